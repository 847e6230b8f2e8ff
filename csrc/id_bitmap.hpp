// A set of small ids as bits, with summaries: the lowest member from anywhere on is found in a few
// steps, however far away it is. Knows neither Python nor vLLM.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "free_list.hpp"

namespace pyblockpool {

// Bit i of word w on level 0 says whether id 64w+i is a member. Between two calls, on each higher
// level:
//
//   bit i of word w is set  <=>  word 64w+i of the level below is not 0
//
// The top level has one word.
class IdBitmap {
 public:
  IdBitmap() { make_levels(0); }

  // Makes room for the ids 0 ... capacity-1, and for as many again as there are, so that ids may
  // come one by one. Throws std::bad_alloc with nothing changed.
  void grow(std::size_t capacity) {
    if (capacity <= capacity_) return;
    capacity = std::max(capacity, 2 * capacity_);
    IdBitmap larger;
    larger.make_levels(capacity);
    for (std::size_t level = 0; level < levels_.size(); ++level) {
      std::copy(levels_[level].begin(), levels_[level].end(), larger.levels_[level].begin());
    }
    for (std::size_t level = levels_.size(); level < larger.levels_.size(); ++level) {
      larger.levels_[level][0] = larger.levels_[level - 1][0] != 0 ? 1U : 0U;
    }
    levels_.swap(larger.levels_);
    capacity_ = capacity;
  }

  std::size_t capacity() const { return capacity_; }
  std::size_t count() const { return count_; }

  bool test(BlockId id) const { return (word(0, id) >> bit(id) & 1) != 0; }

  void set(BlockId id) {
    PYBLOCKPOOL_EXPECT(!test(id));
    ++count_;
    for (std::size_t level = 0; level < levels_.size(); ++level, id >>= kShift) {
      Word& w = word(level, id);
      const bool was_empty = w == 0;
      w |= Word{1} << bit(id);
      if (!was_empty) return;
    }
  }

  void reset(BlockId id) {
    PYBLOCKPOOL_EXPECT(test(id));
    --count_;
    for (std::size_t level = 0; level < levels_.size(); ++level, id >>= kShift) {
      Word& w = word(level, id);
      w &= ~(Word{1} << bit(id));
      if (w != 0) return;
    }
  }

  // The lowest member that is not below `from`, kEnd if there is none.
  BlockId next(BlockId from) const {
    if (static_cast<std::size_t>(from) >= capacity_) return kEnd;
    for (std::size_t level = 0; level < levels_.size(); ++level) {
      if (static_cast<std::size_t>(from >> kShift) >= levels_[level].size()) return kEnd;
      const Word rest = word(level, from) >> bit(from) << bit(from);
      if (rest != 0) {
        from = (from >> kShift << kShift) + lowest_bit(rest);
        while (level-- > 0) from = (from << kShift) + lowest_bit(levels_[level][index(from)]);
        return from;
      }
      from = (from >> kShift) + 1;
    }
    return kEnd;
  }

  // The highest member that is not above `from`, kEnd if there is none.
  BlockId previous(BlockId from) const {
    for (std::size_t level = 0; from >= 0 && level < levels_.size(); ++level) {
      const unsigned above = 63U - bit(from);
      const Word rest = word(level, from) << above >> above;
      if (rest != 0) {
        from = (from >> kShift << kShift) + highest_bit(rest);
        while (level-- > 0) from = (from << kShift) + highest_bit(levels_[level][index(from)]);
        return from;
      }
      from = (from >> kShift) - 1;
    }
    return kEnd;
  }

  // The highest member, kEnd if there is none.
  BlockId highest() const {
    if (count_ == 0) return kEnd;
    BlockId id = 0;
    for (std::size_t level = levels_.size(); level-- > 0;) {
      id = (id << kShift) + highest_bit(levels_[level][index(id)]);
    }
    return id;
  }

 private:
  using Word = std::uint64_t;
  static constexpr int kShift = 6;

  void make_levels(std::size_t capacity) {
    levels_.clear();
    std::size_t words = capacity;
    do {
      words = (words + 63) >> kShift;
      levels_.emplace_back(words > 0 ? words : 1);
    } while (words > 1);
  }

  static std::size_t index(BlockId id) { return static_cast<std::size_t>(id); }
  static unsigned bit(BlockId id) { return static_cast<unsigned>(id) & 63U; }

  Word& word(std::size_t level, BlockId id) { return levels_[level][index(id >> kShift)]; }
  const Word& word(std::size_t level, BlockId id) const {
    PYBLOCKPOOL_EXPECT(id >= 0);
    return levels_[level][index(id >> kShift)];
  }

  static int lowest_bit(Word w) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(w);
#else
    int at = 0;
    while ((w >> at & 1) == 0) ++at;
    return at;
#endif
  }

  static int highest_bit(Word w) {
#if defined(__GNUC__) || defined(__clang__)
    return 63 - __builtin_clzll(w);
#else
    int at = 63;
    while ((w >> at & 1) == 0) --at;
    return at;
#endif
  }

  std::vector<std::vector<Word>> levels_;
  std::size_t capacity_ = 0;
  std::size_t count_ = 0;
};

}  // namespace pyblockpool
