// The bitmap against std::set, step by step.
#include "id_bitmap.hpp"

#include <iostream>
#include <iterator>
#include <random>
#include <set>
#include <string>

#include "require.hpp"

namespace {

using pyblockpool::BlockId;
using pyblockpool::IdBitmap;
using pyblockpool::kEnd;

void require_same(const IdBitmap& bitmap, const std::set<BlockId>& expected,
                  const std::string& after) {
  require(bitmap.count() == expected.size(), after + ": count");
  require(bitmap.highest() == (expected.empty() ? kEnd : *expected.rbegin()), after + ": highest");
  require(bitmap.previous(-1) == kEnd, after + ": previous of all");
  const auto capacity = static_cast<BlockId>(bitmap.capacity());
  for (BlockId from = 0; from <= capacity + 1; ++from) {
    const auto found = expected.lower_bound(from);
    require(bitmap.next(from) == (found == expected.end() ? kEnd : *found),
            after + ": next " + std::to_string(from));
    if (from < capacity) {
      const auto above = expected.upper_bound(from);
      require(bitmap.previous(from) == (above == expected.begin() ? kEnd : *std::prev(above)),
              after + ": previous " + std::to_string(from));
      require(bitmap.test(from) == (expected.count(from) > 0),
              after + ": test " + std::to_string(from));
    }
  }
}

void random_program(unsigned seed, std::size_t capacity) {
  std::mt19937 random(seed);
  IdBitmap bitmap;
  bitmap.grow(capacity);
  std::set<BlockId> expected;
  for (int step = 0; step < 60; ++step) {
    const std::string after = "seed " + std::to_string(seed) + " step " + std::to_string(step);
    if (step % 20 == 19) {
      capacity += random() % 5000;
      bitmap.grow(capacity);
      bitmap.grow(capacity / 2);
      require(bitmap.capacity() >= capacity, after + ": capacity");
    }
    for (auto change = random() % 300; change > 0 && capacity > 0; --change) {
      const auto id = static_cast<BlockId>(random() % capacity);
      if (expected.erase(id) > 0) {
        bitmap.reset(id);
      } else {
        expected.insert(id);
        bitmap.set(id);
      }
    }
    require_same(bitmap, expected, after);
  }
}

}  // namespace

int main() {
  unsigned seed = 0;
  for (const std::size_t capacity : {0, 1, 63, 64, 65, 4095, 4096, 4097, 9000}) {
    random_program(++seed, capacity);
  }
  std::cout << "IdBitmap: " << seed << " random programs\n";
}
