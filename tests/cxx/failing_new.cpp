// Linked into the compiled modules by PYBLOCKPOOL_FAILING_NEW, for tests of what they do when
// memory runs out: each `new` in them comes by here (`--wrap`, see CMakeLists.txt), and one of
// them, or all from one on, throws std::bad_alloc.
#include <cstddef>
#include <new>

extern "C" {

void* __real__Znwm(std::size_t size);  // what `new` would have called

namespace {

long long made = 0;
long long first_to_fail = 0;
long long end_of_failures = 0;

}  // namespace

// The calls of `new` from the `first` on (1 is the next one) fail, up to but without the `end`; 0:
// no end. Both 0: none fails.
__attribute__((visibility("default"))) void pyblockpool_fail_new(long long first, long long end) {
  made = 0;
  first_to_fail = first;
  end_of_failures = end;
}

// How many calls there were since then: a test that ends before them has tried them all.
__attribute__((visibility("default"))) long long pyblockpool_news() { return made; }

void* __wrap__Znwm(std::size_t size) {
  ++made;
  if (first_to_fail != 0 && made >= first_to_fail &&
      (end_of_failures == 0 || made < end_of_failures)) {
    throw std::bad_alloc();
  }
  return __real__Znwm(size);
}
}
