"""In the place of setuptools while pip fetches a source distribution: nothing is built of it."""
