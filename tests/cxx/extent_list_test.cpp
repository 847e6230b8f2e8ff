// LRU over extents: random programs, every rule checked after every step, and what is promised of
// what comes out. That it is what the specification says, Python tests hold.
#include "extent_list.hpp"

#include <algorithm>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "require.hpp"

namespace {

using pyblockpool::BlockId;
using pyblockpool::Chain;
using pyblockpool::ExtentList;
using pyblockpool::FreeList;
using pyblockpool::kEnd;

// Ids that are free or in use, as a pool has them.
class Pool {
 public:
  Pool(std::size_t capacity, BlockId size, unsigned seed) : extents(list, size), random(seed) {
    grow(capacity);
    for (std::size_t id = 0; id < capacity; ++id) in_use.push_back(static_cast<BlockId>(id));
  }

  void grow(std::size_t capacity) {
    extents.grow(capacity);
    list.grow(capacity);
    for (std::size_t id = ids.size(); id < capacity; ++id) ids.push_back(static_cast<BlockId>(id));
    for (BlockId& id : ids) list.set_payload(id, &id);
  }

  std::vector<BlockId> take(std::size_t count, BlockId after) {
    std::vector<void*> out(count);
    std::size_t visited = 0;
    extents.reserve(count);
    const BlockId last = extents.take(count, after, out.data(), [&](void*) { ++visited; });
    require(visited == count, "each payload is visited");
    std::vector<BlockId> taken;
    for (const void* payload : out) taken.push_back(*static_cast<const BlockId*>(payload));
    require(taken.back() == last, "the last id is told");
    in_use.insert(in_use.end(), taken.begin(), taken.end());
    return taken;
  }

  // Some ids in use, as a chain.
  Chain release(std::size_t count) {
    Chain chain;
    for (; count > 0 && !in_use.empty(); --count) {
      const std::size_t at = random() % in_use.size();
      list.extend(chain, in_use[at]);
      in_use.erase(in_use.begin() + static_cast<std::ptrdiff_t>(at));
    }
    return chain;
  }

  std::vector<BlockId> ids;
  std::vector<BlockId> in_use;
  FreeList list;
  ExtentList extents;
  std::mt19937 random;
};

void random_program(unsigned seed, std::size_t capacity, BlockId size) {
  Pool pool(capacity, size, seed);
  ExtentList& extents = pool.extents;
  for (int step = 0; step < 1500; ++step) {
    const std::string what = "seed " + std::to_string(seed) + " step " + std::to_string(step);
    const auto choice = pool.random() % 12;
    if (choice < 4 && extents.size() > 0) {
      const bool hinted = choice < 2 && !pool.in_use.empty();
      const BlockId after = hinted ? pool.in_use[pool.random() % pool.in_use.size()] : kEnd;
      const std::size_t most = pool.random() % 8 == 0 ? 400 : 40;
      const std::size_t count = 1 + pool.random() % std::min(extents.size(), most);
      const std::vector<BlockId> taken = pool.take(count, after);
      auto opened = taken.begin();
      for (BlockId id = after; opened != taken.end() && hinted && *opened == id + 1; ++opened) {
        id = *opened;
      }
      // What does not fill an extent comes last: it may go where an aged extent has room.
      const auto over = taken.end() - (taken.end() - opened) % size;
      if (extents.shortages() == 0) {
        require(std::is_sorted(opened, over), what + ": order");
        require(std::is_sorted(over, taken.end()), what + ": order of the last");
      }
    } else if (choice < 7) {
      extents.add_cached(pool.release(pool.random() % 60));
    } else if (choice < 9) {
      extents.add_unhashed(pool.release(pool.random() % 30));
    } else if (choice < 11 && extents.size() > 0) {
      const std::vector<BlockId> walk = extents.walk();
      const BlockId id = walk[pool.random() % walk.size()];
      extents.remove(id);
      pool.in_use.push_back(id);
    } else if (pool.random() % 20 == 0) {
      extents.forget_hashes();
      require(extents.aged() == 0 && extents.unhashed() == extents.size(), what + ": forget");
    } else if (pool.random() % 40 == 0) {
      const std::size_t before = pool.ids.size();
      pool.grow(before + pool.random() % 20);
      for (std::size_t id = before; id < pool.ids.size(); ++id) {
        pool.in_use.push_back(static_cast<BlockId>(id));
      }
    }
    require(extents.check().empty(), what + ": " + extents.check());
    require(pool.list.check().empty(), what + ": " + pool.list.check());
    require(extents.size() + pool.in_use.size() == pool.ids.size(), what + ": nothing is lost");
  }
  const std::vector<BlockId> walk = extents.walk();
  require(walk.size() == extents.size(), "the walk has all ids");
  for (const BlockId id : walk) require(pool.take(1, kEnd).front() == id, "the walk is true");
}

}  // namespace

int main() {
  unsigned seed = 0;
  for (const BlockId size : {1, 2, 8, 64, 4096}) {
    for (const std::size_t capacity : {0, 1, 7, 64, 200, 1000}) {
      for (int repeat = 0; repeat < 3; ++repeat) random_program(++seed, capacity, size);
    }
  }
  std::cout << "ExtentList: " << seed << " random programs\n";
}
