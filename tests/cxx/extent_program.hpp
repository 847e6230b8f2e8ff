// A random program for LRU over extents: every rule checked after every step, the walk against its
// definition, and what is promised of what comes out.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "choices.hpp"
#include "extent_list.hpp"
#include "require.hpp"

namespace pyblockpool {

// Ids that are free or in use, as a pool has them; and what it takes to know the walk: which
// extents are aged, longest whole first, and which one is shared.
class ExtentPool {
 public:
  ExtentPool(std::size_t capacity, BlockId extent_size, bool pack_tails, Choices& source)
      : extents(list, extent_size, pack_tails), choices(source), size(extent_size) {
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
    const BlockId single = count == 1 && after == kEnd ? walk().front() : kEnd;
    const bool is_fragment = !list.is_aside(single) && !goes_at_once(single / size);
    std::vector<void*> out(count);
    std::size_t visited = 0;
    extents.reserve(count);
    const BlockId last = extents.take(count, after, out.data(), [&](void*) { ++visited; });
    require(visited == count, "each payload is visited");
    std::vector<BlockId> taken;
    for (const void* payload : out) taken.push_back(*static_cast<const BlockId*>(payload));
    require(taken.back() == last, "the last id is told");
    in_use.insert(in_use.end(), taken.begin(), taken.end());
    if (single != kEnd) {
      require(last == single, "a single id without a hint is the first of the walk");
      if (!is_fragment) shared = single / size;
    }
    forget_broken();
    return taken;
  }

  void add_cached(std::size_t count) {
    const std::vector<BlockId> chosen = choose(count);
    extents.add_cached(chain_of(chosen));
    note_whole(chosen);
  }

  void add_unhashed(std::size_t count) {
    const std::vector<BlockId> chosen = choose(count);
    extents.add_unhashed(chain_of(chosen));
    note_whole(chosen);
  }

  void remove(BlockId id) {
    extents.remove(id);
    in_use.push_back(id);
    forget_broken();
  }

  void forget_hashes() {
    extents.forget_hashes();
    aged.clear();
    shared = kEnd;
  }

  // The walk as it is defined (see ExtentList::after).
  std::vector<BlockId> walk() const {
    const std::size_t end = ids.size() / index(size) + 1;
    std::vector<bool> at_once(end);
    std::vector<BlockId> spendable(end);
    std::vector<BlockId> clean;
    std::vector<BlockId> parts;
    for (std::size_t at = 0; at < end; ++at) {
      const auto k = static_cast<BlockId>(at);
      at_once[at] = goes_at_once(k);
      spendable[at] = spendable_in(k);
      if (spendable[at] == size) clean.push_back(k);
      if (!is_whole(k) && k != shared) parts.push_back(k);
    }
    // Runs do not matter to extents of one id.
    if (size > 1) sort_by_runs(clean);
    std::stable_sort(parts.begin(), parts.end(), [&](BlockId a, BlockId b) {
      return spendable[index(a)] > spendable[index(b)];
    });
    std::vector<BlockId> extents_in_order;
    if (shared != kEnd) extents_in_order.push_back(shared);
    for (const BlockId k : clean) extents_in_order.push_back(k);
    std::copy_if(aged.rbegin(), aged.rend(), std::back_inserter(extents_in_order),
                 [&](BlockId k) { return !at_once[index(k)]; });
    std::copy_if(aged.begin(), aged.end(), std::back_inserter(extents_in_order),
                 [&](BlockId k) { return at_once[index(k)]; });
    for (const BlockId k : parts) extents_in_order.push_back(k);
    std::vector<BlockId> walk;
    for (const BlockId k : extents_in_order) {
      for (BlockId id = k * size; id < end_of(k); ++id) {
        if (at_once[index(k)] || list.is_aside(id)) walk.push_back(id);
      }
    }
    for (BlockId id = list.front(); id != kEnd; id = list.next(id)) {
      if (!at_once[index(id / size)]) walk.push_back(id);
    }
    return walk;
  }

  std::vector<BlockId> ids;
  std::vector<BlockId> in_use;
  FreeList list;
  ExtentList extents;

 private:
  std::vector<BlockId> choose(std::size_t count) {
    std::vector<BlockId> chosen;
    for (; count > 0 && !in_use.empty(); --count) {
      const std::size_t at = choices.below(in_use.size());
      chosen.push_back(in_use[at]);
      in_use.erase(in_use.begin() + static_cast<std::ptrdiff_t>(at));
    }
    return chosen;
  }

  Chain chain_of(const std::vector<BlockId>& chosen) {
    Chain chain;
    for (const BlockId id : chosen) list.extend(chain, id);
    return chain;
  }

  // Some ids have been freed, in this order: an extent is whole with the last one of it.
  void note_whole(const std::vector<BlockId>& freed) {
    for (std::size_t i = 0; i < freed.size(); ++i) {
      const BlockId k = freed[i] / size;
      const bool is_last = std::none_of(freed.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                        freed.end(), [&](BlockId id) { return id / size == k; });
      if (!is_last || !is_whole(k)) continue;
      if (spendable_in(k) < size) aged.push_back(k);
      if (shared == k) shared = kEnd;
    }
  }

  void forget_broken() {
    aged.erase(std::remove_if(aged.begin(), aged.end(), [this](BlockId k) { return !is_whole(k); }),
               aged.end());
  }

  static std::size_t index(BlockId id) { return static_cast<std::size_t>(id); }

  BlockId end_of(BlockId k) const {
    return std::min((k + 1) * size, static_cast<BlockId>(ids.size()));
  }

  bool is_whole(BlockId k) const {
    BlockId id = k * size;
    while (id < end_of(k) && list.contains(id)) ++id;
    return id == (k + 1) * size;
  }

  // An aged extent of which single ids are not taken before it is opened.
  bool goes_at_once(BlockId k) const {
    const BlockId spendable = spendable_in(k);
    return is_whole(k) && (extents.pack_tails() ? spendable == 0 : spendable < size);
  }

  BlockId spendable_in(BlockId k) const {
    BlockId count = 0;
    for (BlockId id = k * size; id < end_of(k); ++id) count += list.is_aside(id) ? 1 : 0;
    return count;
  }

  // Ascending extents become those of the shortest runs of neighbours first.
  static void sort_by_runs(std::vector<BlockId>& extents) {
    std::vector<std::pair<std::size_t, BlockId>> by_length;
    for (std::size_t begin = 0, end = 0; begin < extents.size(); begin = end) {
      while (end < extents.size() && index(extents[end] - extents[begin]) == end - begin) ++end;
      for (std::size_t i = begin; i < end; ++i) by_length.emplace_back(end - begin, extents[i]);
    }
    std::sort(by_length.begin(), by_length.end());
    extents.clear();
    for (const auto& [length, k] : by_length) extents.push_back(k);
  }

  Choices& choices;
  const BlockId size;
  std::vector<BlockId> aged;
  BlockId shared = kEnd;
};

inline void require_walk(const ExtentPool& pool, const std::string& when) {
  const std::vector<BlockId> walk = pool.walk();
  require(walk.size() == pool.extents.size(), when + ": the walk has all ids");
  BlockId last = kEnd;
  const auto require_next = [&](BlockId id) {
    if (pool.extents.after(last) != id) require(false, when + ": after " + std::to_string(last));
    if (pool.extents.before(id) != last) require(false, when + ": before " + std::to_string(id));
    last = id;
  };
  for (const BlockId id : walk) require_next(id);
  require_next(kEnd);
}

// Random operations, each rule checked and the walk followed after each of them.
inline void extent_program(Choices& choices, std::size_t capacity, BlockId size, bool pack_tails,
                           const std::string& name) {
  ExtentPool pool(capacity, size, pack_tails, choices);
  ExtentList& extents = pool.extents;
  for (int step = 0; choices.another_step(); ++step) {
    const std::string what = name + " step " + std::to_string(step);
    const std::size_t choice = choices.below(12);
    if (choice < 4 && extents.size() > 0) {
      const bool hinted = choice < 2 && !pool.in_use.empty();
      const BlockId after = hinted ? pool.in_use[choices.below(pool.in_use.size())] : kEnd;
      const std::size_t most = std::array<std::size_t, 4>{1, 1, 40, 400}[choices.below(4)];
      const std::size_t count = 1 + choices.below(std::min(extents.size(), most));
      const std::vector<BlockId> taken = pool.take(count, after);
      auto opened = taken.begin();
      for (BlockId id = after; opened != taken.end() && hinted && *opened == id + 1; ++opened) {
        id = *opened;
      }
      // What does not fill an extent comes last: packed, it goes where an aged one has room.
      const auto over = taken.end() - (pack_tails ? (taken.end() - opened) % size : 0);
      if (extents.shortages() == 0) {
        require(std::is_sorted(opened, over), what + ": order");
        require(std::is_sorted(over, taken.end()), what + ": order of the last");
      }
    } else if (choice < 7) {
      pool.add_cached(choices.below(60));
    } else if (choice < 9) {
      pool.add_unhashed(choices.below(30));
    } else if (choice < 11 && extents.size() > 0) {
      // The first queued one from anywhere on.
      auto id = static_cast<BlockId>(choices.below(pool.ids.size()));
      while (!pool.list.contains(id)) {
        id = static_cast<std::size_t>(id) + 1 < pool.ids.size() ? id + 1 : 0;
      }
      pool.remove(id);
    } else if (choices.below(20) == 0) {
      pool.forget_hashes();
      require(extents.aged() == 0 && extents.unhashed() == extents.size(), what + ": forget");
    } else if (choices.below(40) == 0) {
      const std::size_t before = pool.ids.size();
      pool.grow(before + choices.below(20));
      for (std::size_t id = before; id < pool.ids.size(); ++id) {
        pool.in_use.push_back(static_cast<BlockId>(id));
      }
    }
    require(extents.check().empty(), what + ": " + extents.check());
    require(pool.list.check().empty(), what + ": " + pool.list.check());
    require(extents.size() + pool.in_use.size() == pool.ids.size(), what + ": nothing is lost");
    require_walk(pool, what);
  }
  const std::vector<BlockId> walk = pool.walk();
  for (const BlockId id : walk) require(pool.take(1, kEnd).front() == id, "the walk is true");
}

}  // namespace pyblockpool
