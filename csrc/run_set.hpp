// A set of small ids as runs of neighbours: the run that fits best is found in a few steps, however
// many there are. Knows neither Python nor vLLM.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "free_list.hpp"
#include "id_bitmap.hpp"

namespace pyblockpool {

// A run is as many neighbours as there are. Between two calls:
//
//   a run of n ids begins at id         <=>  length_[id] == n > 0  <=>  firsts_.test(id)
//   a run of n < kLong begins at id     <=>  short_[n].test(id)
//   short_[n] has a member              <=>  lengths_.test(n)
//   a run of n >= kLong begins at id    <=>  {id, n} is in long_, sorted by length, then id
//   count()                              =   the sum of length_
//
// Long runs are few, so that they may move about in a vector.
class RunSet {
 public:
  struct Run {
    BlockId first = kEnd;
    BlockId length = 0;
  };

  RunSet() { lengths_.grow(kLong); }

  // Makes room for the ids 0 ... capacity-1. Throws std::bad_alloc; what has grown by then does no
  // harm.
  void grow(std::size_t capacity) {
    if (capacity <= length_.size()) return;
    firsts_.grow(capacity);
    for (std::size_t n = 1; n < kLong; ++n) short_[n].grow(capacity);
    long_.reserve(capacity / (kLong + 1) + 1);
    length_.resize(capacity, 0);
  }

  std::size_t count() const { return count_; }

  bool test(BlockId id) const { return run_of(id).length > 0; }

  void set(BlockId id) {
    PYBLOCKPOOL_EXPECT(!test(id));
    const Run before = id > 0 ? run_of(id - 1) : Run{};
    const auto behind = static_cast<std::size_t>(id) + 1;
    const BlockId after = behind < length_.size() ? length_[behind] : 0;
    if (after > 0) resize(id + 1, 0);
    resize(before.length > 0 ? before.first : id, before.length + 1 + after);
    ++count_;
  }

  void reset(BlockId id) {
    const Run run = run_of(id);
    PYBLOCKPOOL_EXPECT(run.length > 0);
    const BlockId before = id - run.first;
    resize(run.first, before);
    if (before + 1 < run.length) resize(id + 1, run.length - before - 1);
    --count_;
  }

  // Takes the first `most` ids of a run out of the set, all if it has no more; returns them.
  Run take(const Run& run, std::size_t most) {
    PYBLOCKPOOL_EXPECT(most > 0);
    const Run taken{run.first, shorter(run.length, most)};
    resize(run.first, 0);
    if (taken.length < run.length) resize(run.first + taken.length, run.length - taken.length);
    count_ -= static_cast<std::size_t>(taken.length);
    return taken;
  }

  // The shortest run that has `wanted` ids; if none has, the longest. The lowest of several. The
  // set must not be empty.
  Run best(std::size_t wanted) const {
    PYBLOCKPOOL_EXPECT(wanted > 0 && count_ > 0);
    if (wanted < kLong) {
      const BlockId shortest = lengths_.next(static_cast<BlockId>(wanted));
      if (shortest != kEnd) return lowest_of(shortest);
    }
    if (long_.empty()) return lowest_of(lengths_.highest());
    const BlockId longest = long_.back().length;
    return *place_of({0, shorter(longest, wanted)});
  }

  // The member behind one when they go run by run: the shortest run first, the lowest of several of
  // one length first. kEnd stands for both ends.
  BlockId after(BlockId id) const {
    const Run run = id == kEnd ? Run{} : run_of(id);
    if (id + 1 < run.first + run.length) return id + 1;
    return run_after(run).first;
  }

  // The member before one in that order.
  BlockId before(BlockId id) const {
    Run run = id == kEnd ? Run{} : run_of(id);
    if (id > run.first) return id - 1;
    run = run_before(run);
    return run.length == 0 ? kEnd : run.first + run.length - 1;
  }

  // The first broken rule as text, "" if all hold. O(capacity).
  std::string check() const {
    std::size_t count = 0;
    BlockId end = kEnd;
    std::vector<Run> longs;
    for (BlockId id = 0; index(id) < length_.size(); ++id) {
      const BlockId length = length_[index(id)];
      const auto broken = [id](const char* how) {
        return "the run at " + std::to_string(id) + how;
      };
      if (firsts_.test(id) != (length > 0)) return broken(" is noted in one place only");
      for (std::size_t n = 1; n < kLong; ++n) {
        if (short_[n].test(id) != (index(length) == n)) return broken(" is filed wrongly");
      }
      if (length == 0) continue;
      if (id <= end) return broken(" touches the one before");
      end = id + length;
      count += index(length);
      if (index(length) >= kLong) longs.push_back({id, length});
    }
    if (end > static_cast<BlockId>(length_.size())) return "the last run is longer than the set";
    for (std::size_t n = 1; n < kLong; ++n) {
      if ((short_[n].count() > 0) != lengths_.test(static_cast<BlockId>(n))) {
        return "that there are runs of " + std::to_string(n) + " ids is noted wrongly";
      }
    }
    std::sort(longs.begin(), longs.end(), comes_before);
    const auto same = [](const Run& a, const Run& b) {
      return a.first == b.first && a.length == b.length;
    };
    if (!std::equal(longs.begin(), longs.end(), long_.begin(), long_.end(), same)) {
      return "the long runs are filed wrongly";
    }
    return count == count_ ? "" : "the count of members is wrong";
  }

 private:
  friend struct BrokenRunSet;  // tests that check() notices

  static constexpr std::size_t kLong = 32;

  static std::size_t index(BlockId id) { return static_cast<std::size_t>(id); }

  static BlockId shorter(BlockId length, std::size_t most) {
    return static_cast<BlockId>(std::min(static_cast<std::size_t>(length), most));
  }

  static bool comes_before(const Run& a, const Run& b) {
    return a.length != b.length ? a.length < b.length : a.first < b.first;
  }

  Run run_of(BlockId id) const {
    const BlockId first = firsts_.previous(id);
    if (first == kEnd || id - first >= length_[index(first)]) return {};
    return {first, length_[index(first)]};
  }

  Run lowest_of(BlockId length) const { return {short_[index(length)].next(0), length}; }

  // The run behind one when they are sorted by length, then id. The run without ids stands for both
  // ends.
  Run run_after(const Run& run) const {
    if (index(run.length) < kLong) {
      // Also where there is no length: short_[0] is empty.
      const BlockId alike = short_[index(run.length)].next(run.first + 1);
      if (alike != kEnd) return {alike, run.length};
      const BlockId longer = lengths_.next(run.length + 1);
      if (longer != kEnd) return lowest_of(longer);
      return long_.empty() ? Run{} : long_.front();
    }
    const auto behind = place_of(run) + 1;
    return behind == long_.end() ? Run{} : *behind;
  }

  Run run_before(const Run& run) const {
    BlockId length = lengths_.highest();
    if (run.length == 0 || index(run.length) >= kLong) {
      const auto place = run.length == 0 ? long_.end() : place_of(run);
      if (place != long_.begin()) return *(place - 1);
    } else {
      const BlockId alike = short_[index(run.length)].previous(run.first - 1);
      if (alike != kEnd) return {alike, run.length};
      length = lengths_.previous(run.length - 1);
    }
    return length == kEnd ? Run{} : Run{short_[index(length)].highest(), length};
  }

  // Where among the long runs this one is, or would be.
  std::vector<Run>::const_iterator place_of(const Run& run) const {
    return std::lower_bound(long_.begin(), long_.end(), run, comes_before);
  }

  // A run begins, is longer or shorter, or, with no length, is no more.
  void resize(BlockId first, BlockId length) {
    BlockId& was = length_[index(first)];
    if (was > 0) unfile({first, was});
    if (length > 0) file({first, length});
    if (was == 0) firsts_.set(first);
    if (length == 0) firsts_.reset(first);
    was = length;
  }

  void file(const Run& run) {
    const std::size_t length = index(run.length);
    if (length >= kLong) {
      PYBLOCKPOOL_EXPECT(long_.size() < long_.capacity());
      long_.insert(place_of(run), run);
    } else {
      if (short_[length].count() == 0) lengths_.set(run.length);
      short_[length].set(run.first);
    }
  }

  void unfile(const Run& run) {
    const std::size_t length = index(run.length);
    if (length >= kLong) {
      long_.erase(place_of(run));
    } else {
      short_[length].reset(run.first);
      if (short_[length].count() == 0) lengths_.reset(run.length);
    }
  }

  std::vector<BlockId> length_;
  IdBitmap firsts_;
  std::array<IdBitmap, kLong> short_;
  IdBitmap lengths_;
  std::vector<Run> long_;
  std::size_t count_ = 0;
};

}  // namespace pyblockpool
