// LRU over extents: random programs. That it is what the specification says, Python tests hold.
#include <iostream>
#include <string>

#include "choices.hpp"
#include "extent_program.hpp"

int main() {
  unsigned seed = 0;
  for (const pyblockpool::BlockId size : {1, 2, 8, 64, 4096}) {
    for (const std::size_t capacity : {0, 1, 7, 64, 200, 1000}) {
      for (int repeat = 0; repeat < 4; ++repeat) {
        SeededChoices choices(++seed, 1500);
        pyblockpool::extent_program(choices, capacity, size, seed % 2 == 0,
                                    "seed " + std::to_string(seed));
      }
    }
  }
  std::cout << "ExtentList: " << seed << " random programs\n";
}
