// Runs of neighbours against a plain set of ids, step by step.
#include "run_set.hpp"

#include <algorithm>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "require.hpp"

namespace pyblockpool {

// Breaks the rules of a set one at a time.
struct BrokenRunSet {
  static void set_length(RunSet& set, std::size_t id, BlockId length) { set.length_[id] = length; }
  static void set_count(RunSet& set, std::size_t count) { set.count_ = count; }
  static void forget(RunSet& set, BlockId length) { set.lengths_.reset(length); }
  static void forget_long(RunSet& set) { set.long_.clear(); }
  static void begin(RunSet& set, BlockId id) { set.firsts_.set(id); }
};

}  // namespace pyblockpool

namespace {

using pyblockpool::BlockId;
using pyblockpool::BrokenRunSet;
using pyblockpool::kEnd;
using pyblockpool::RunSet;

std::vector<RunSet::Run> runs_of(const std::vector<bool>& members) {
  std::vector<RunSet::Run> runs;
  for (std::size_t id = 0; id < members.size(); ++id) {
    if (!members[id]) continue;
    if (id == 0 || !members[id - 1]) runs.push_back({static_cast<BlockId>(id), 0});
    ++runs.back().length;
  }
  return runs;
}

bool same(const RunSet::Run& a, const RunSet::Run& b) {
  return a.first == b.first && a.length == b.length;
}

RunSet::Run best_of(const std::vector<RunSet::Run>& runs, BlockId wanted) {
  RunSet::Run shortest;
  RunSet::Run longest;
  for (const RunSet::Run& run : runs) {
    if (run.length > longest.length) longest = run;
    if (run.length >= wanted && (shortest.length == 0 || run.length < shortest.length)) {
      shortest = run;
    }
  }
  return shortest.length > 0 ? shortest : longest;
}

void require_same(const RunSet& set, const std::vector<bool>& members, const std::string& after) {
  require(set.check().empty(), after + ": " + set.check());
  const auto count = std::count(members.begin(), members.end(), true);
  require(set.count() == static_cast<std::size_t>(count), after + ": count");
  for (std::size_t id = 0; id < members.size(); ++id) {
    require(set.test(static_cast<BlockId>(id)) == members[id], after + ": test");
  }
  std::vector<RunSet::Run> runs = runs_of(members);
  std::stable_sort(runs.begin(), runs.end(),
                   [](const RunSet::Run& a, const RunSet::Run& b) { return a.length < b.length; });
  BlockId last = kEnd;
  const auto require_next = [&](BlockId id) {
    require(set.after(last) == id, after + ": after " + std::to_string(last));
    require(set.before(id) == last, after + ": before " + std::to_string(id));
    last = id;
  };
  for (const RunSet::Run& run : runs) {
    for (BlockId id = run.first; id < run.first + run.length; ++id) require_next(id);
  }
  require_next(kEnd);
}

// Ids come and go in stretches up to `longest`, so that runs of all lengths occur.
void random_program(unsigned seed, std::size_t capacity, std::size_t longest) {
  std::mt19937 random(seed);
  RunSet set;
  set.grow(capacity);
  std::vector<bool> members(capacity);
  for (int step = 0; step < 300; ++step) {
    const std::string what = "seed " + std::to_string(seed) + " step " + std::to_string(step);
    const auto choice = random() % 8;
    if (choice == 0 && step % 10 == 0) {
      capacity += random() % 100;
      set.grow(capacity);
      set.grow(capacity / 2);
      members.resize(capacity);
    } else if (choice < 6 && capacity > 0) {
      const bool come = choice < 3;
      const std::size_t begin = random() % capacity;
      const std::size_t end = std::min(capacity, begin + 1 + random() % longest);
      for (std::size_t id = begin; id < end; ++id) {
        if (members[id] == come) continue;
        members[id] = come;
        come ? set.set(static_cast<BlockId>(id)) : set.reset(static_cast<BlockId>(id));
      }
    } else if (set.count() > 0) {
      const std::size_t wanted = 1 + random() % (2 * longest);
      const RunSet::Run best = set.best(wanted);
      require(same(best, best_of(runs_of(members), static_cast<BlockId>(wanted))), what + ": best");
      const RunSet::Run taken = set.take(best, wanted);
      const auto length = std::min(wanted, static_cast<std::size_t>(best.length));
      require(same(taken, {best.first, static_cast<BlockId>(length)}), what + ": taken");
      std::fill_n(members.begin() + taken.first, taken.length, false);
    }
    require_same(set, members, what);
  }
}

// The best of many runs, short and long ones.
void every_length() {
  RunSet set;
  std::vector<bool> members(40000);
  set.grow(members.size());
  std::mt19937 random(1);
  for (std::size_t id = 0; id < members.size();) {
    for (auto length = 1 + random() % 200; length > 0 && id < members.size(); --length, ++id) {
      members[id] = true;
      set.set(static_cast<BlockId>(id));
    }
    ++id;
  }
  require_same(set, members, "every length");
  const std::vector<RunSet::Run> runs = runs_of(members);
  for (BlockId wanted = 1; wanted < 300; ++wanted) {
    require(same(set.best(static_cast<std::size_t>(wanted)), best_of(runs, wanted)),
            "best of " + std::to_string(wanted));
  }
  require(same(set.best(std::size_t{1} << 40), best_of(runs, 40000)), "best of far too many");
}

template <class Break>
void require_noticed(Break break_it, const std::string& expected) {
  RunSet set;
  set.grow(100);
  for (const BlockId id : {3, 4, 5}) set.set(id);
  for (BlockId id = 50; id < 90; ++id) set.set(id);
  break_it(set);
  require(set.check() == expected, "check() says \"" + set.check() + "\"");
}

void broken_sets() {
  require_noticed([](RunSet& set) { BrokenRunSet::set_length(set, 3, 2); },
                  "the run at 3 is filed wrongly");
  require_noticed([](RunSet& set) { BrokenRunSet::begin(set, 4); },
                  "the run at 4 is noted in one place only");
  require_noticed([](RunSet& set) { BrokenRunSet::set_count(set, 5); },
                  "the count of members is wrong");
  require_noticed([](RunSet& set) { BrokenRunSet::forget(set, 3); },
                  "that there are runs of 3 ids is noted wrongly");
  require_noticed([](RunSet& set) { BrokenRunSet::forget_long(set); },
                  "the long runs are filed wrongly");
}

}  // namespace

int main() {
  broken_sets();
  every_length();
  unsigned seed = 0;
  for (const std::size_t capacity : {0, 1, 63, 64, 200, 700}) {
    for (const std::size_t longest : {1, 4, 40, 150}) random_program(++seed, capacity, longest);
  }
  std::cout << "RunSet: " << seed << " random programs\n";
}
