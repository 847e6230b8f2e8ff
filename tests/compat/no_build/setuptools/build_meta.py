"""A build backend that knows name and version, and builds nothing.

pip asks each source distribution for its metadata before it keeps the file. vLLM's own backend
needs PyTorch for that, in an environment of its own: minutes and gigabytes for a file that is only
unpacked.
"""

from pathlib import Path

ASKED_FOR = ("Metadata-Version:", "Name:", "Version:")


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: object = None
) -> str:
    """Of the distribution in the working directory, as its PKG-INFO has it."""
    lines = Path("PKG-INFO").read_text(encoding="utf-8").splitlines()
    metadata = Path(metadata_directory) / "vllm.dist-info"
    metadata.mkdir()
    told = [line for line in lines if line.startswith(ASKED_FOR)]
    (metadata / "METADATA").write_text("\n".join([*told, ""]), encoding="utf-8")
    return metadata.name


def build_wheel(*arguments: object, **options: object) -> str:
    raise RuntimeError("this backend only answers `pip download`: vLLM is not built")
