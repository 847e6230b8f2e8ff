// The C++ core under a coverage-guided fuzzer: the random programs of the tests, with the bytes
// that it makes as their choices. With Clang and PYBLOCKPOOL_LIBFUZZER it is libFuzzer that makes
// them; else random_bytes.cpp.
#include <array>
#include <cstddef>
#include <cstdint>

#include "choices.hpp"
#include "extent_program.hpp"
#include "free_list_program.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ByteChoices choices(data, size);
  const std::size_t kind = choices.below(8);
  if (kind < 2) {
    pyblockpool::free_list_program(choices, kind == 1, "bytes");
    return 0;
  }
  const std::array<pyblockpool::BlockId, 8> sizes = {1, 2, 2, 4, 8, 8, 16, 64};
  const pyblockpool::BlockId extent_size = sizes[choices.below(sizes.size())];
  const std::size_t capacity = choices.below(kind == 7 ? 1000 : 80);
  const bool pack_tails = choices.below(2) == 1;
  pyblockpool::extent_program(choices, capacity, extent_size, pack_tails, "bytes");
  return 0;
}
