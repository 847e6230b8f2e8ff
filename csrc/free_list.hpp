// A doubly linked list of block ids: the order in which free KV-cache blocks are handed out under
// policy `lru`. Knows neither Python nor vLLM.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#if defined(PYBLOCKPOOL_INTERNAL_CHECKS)
#include <cstdio>
#include <cstdlib>
#define PYBLOCKPOOL_EXPECT(condition)                                              \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)
#else
#define PYBLOCKPOOL_EXPECT(condition) assert(condition)
#endif

#if defined(__GNUC__) || defined(__clang__)
#define PYBLOCKPOOL_PREFETCH(address) __builtin_prefetch(address)
#else
#define PYBLOCKPOOL_PREFETCH(address) static_cast<void>(address)
#endif

namespace pyblockpool {

using BlockId = std::int32_t;

// Both ends of every list: vLLM's fake head and tail have this block id too.
inline constexpr BlockId kEnd = -1;

// A stretch of linked ids that is not in the list yet: either spliced into it as a whole or
// dissolved, so that a bulk call is all or nothing.
struct Chain {
  BlockId first = kEnd;
  BlockId last = kEnd;
  std::size_t size = 0;
};

// Let L be the ids reached from the end by following `next` until the end comes again. Between two
// calls, chains under construction aside:
//
//   id in L or aside   <=>  next(id) != kUnlinked
//   prev(next(id)) == id    for each id in L and for the end
//   |L| == size()
//
// An id that is aside belongs to the owner of the list without being in L, so that one look tells
// whether an id is anywhere.
//
// An id also carries a payload, whatever the owner of the list keeps under it; null until set.
// Links and payload of one id share sixteen bytes, as most operations need all three; id -1, the
// end, has index 0.
class FreeList {
 public:
  FreeList() { grow(0); }

  // A list for whoever cannot handle a constructor that throws: it has no room, not even for its
  // end, so that grow() has to come before anything else.
  struct Bare {};
  explicit FreeList(Bare) noexcept {}

  // Makes room for the ids 0 ... capacity-1. Ids that are new are unlinked. Throws std::bad_alloc
  // with nothing changed; never after reserve(capacity).
  void grow(std::size_t capacity) {
    reserve(capacity);
    if (links_.empty()) links_.push_back(Links{kEnd, kEnd, nullptr});
    if (capacity + 1 <= links_.size()) return;
    if (looks_ahead()) ahead_.resize(capacity + 1, kEnd);
    links_.resize(capacity + 1, Links{kUnlinked, kUnlinked, nullptr});
  }

  // Throws std::bad_alloc with nothing changed.
  void reserve(std::size_t capacity) {
    reserve_in(links_, capacity + 1);
    if (looks_ahead()) reserve_in(ahead_, capacity + 1);
  }

  // From here on the list notes which ids are coming, for those who pop many of them: four bytes an
  // id. Throws std::bad_alloc with nothing changed.
  void look_ahead() { ahead_.resize(links_.size(), kEnd); }

  std::size_t capacity() const { return links_.size() - 1; }
  std::size_t size() const { return size_; }

  // True for members of the list and of a chain under construction, and for what is aside.
  bool contains(BlockId id) const { return at(id).next != kUnlinked; }

  bool is_aside(BlockId id) const { return at(id).next == kAside; }
  void set_aside(BlockId id) {
    PYBLOCKPOOL_EXPECT(!contains(id));
    at(id).next = kAside;
  }
  void take_back(BlockId id) {
    PYBLOCKPOOL_EXPECT(is_aside(id));
    at(id).next = kUnlinked;
  }

  void* payload(BlockId id) const { return at(id).payload; }
  void set_payload(BlockId id, void* payload) { at(id).payload = payload; }

  BlockId front() const { return next(kEnd); }
  BlockId back() const { return prev(kEnd); }
  BlockId next(BlockId id) const { return at(id).next; }
  BlockId prev(BlockId id) const { return at(id).prev; }

  BlockId pop_front() {
    const BlockId id = front();
    PYBLOCKPOOL_EXPECT(id != kEnd);
    const BlockId after = next(id);
    join(kEnd, after);
    at(id).next = kUnlinked;
    --size_;
    return id;
  }

  // Takes the first `count` ids off the list, in order: calls each(id, payload).
  template <class Each>
  void pop_front_each(std::size_t count, Each each) {
    PYBLOCKPOOL_EXPECT(count <= size_);
    BlockId id = front();
    for (std::size_t i = 0; i < count; ++i) {
      if (looks_ahead()) {
        const BlockId later = ahead_[index(id)];
        PYBLOCKPOOL_PREFETCH(&links_[index(later)]);
        PYBLOCKPOOL_PREFETCH(&ahead_[index(later)]);
      }
      Links& links = at(id);
      const BlockId after = links.next;
      links.next = kUnlinked;
      each(id, links.payload);
      id = after;
    }
    join(kEnd, id);
    size_ -= count;
  }

  // The same, but puts the payloads into `out` and calls visit(payload) for each. The visits run a
  // few steps behind, so that what a payload points to is loaded by then: the list is small and
  // stays in cache, what it orders is not.
  template <class Visit>
  void pop_front_n(std::size_t count, void** out, Visit visit) {
    constexpr std::size_t kBehind = 16;
    std::size_t i = 0;
    pop_front_each(count, [&](BlockId, void* payload) {
      out[i] = payload;
      PYBLOCKPOOL_PREFETCH(payload);
      if (i >= kBehind) visit(out[i - kBehind]);
      ++i;
    });
    for (i = count > kBehind ? count - kBehind : 0; i < count; ++i) visit(out[i]);
  }

  void push_back(BlockId id) {
    PYBLOCKPOOL_EXPECT(!contains(id));
    join(back(), id);
    join(id, kEnd);
    ++size_;
  }

  void remove(BlockId id) {
    PYBLOCKPOOL_EXPECT(id != kEnd && contains(id));
    Links& links = at(id);
    join(links.prev, links.next);
    links.next = kUnlinked;
    --size_;
  }

  // What is around ids that lie side by side.
  struct Gap {
    BlockId before;
    BlockId after;
  };

  // Whether the `count` > 1 ids from `first` on are in the list side by side, in whatever order:
  // the links lead out of them once, where the link of an id that is not in the list leads out,
  // too. Looks at the ids by number, so that it need not wait for one to know which is next.
  bool lie_together(BlockId first, BlockId count, Gap& around) const {
    PYBLOCKPOOL_EXPECT(count > 1);
    const auto inside = [first, count](BlockId id) {
      return static_cast<std::uint32_t>(id - first) < static_cast<std::uint32_t>(count);
    };
    bool left = false;
    for (BlockId id = first; id < first + count; ++id) {
      const Links& links = at(id);
      if (!inside(links.prev)) around.before = links.prev;
      if (!inside(links.next)) {
        if (left) return false;
        left = true;
        around.after = links.next;
      }
    }
    return true;
  }

  // Removes ids that lie together.
  void remove_together(BlockId first, BlockId count, const Gap& around) {
    for (BlockId id = first; id < first + count; ++id) at(id).next = kUnlinked;
    join(around.before, around.after);
    size_ -= static_cast<std::size_t>(count);
  }

  // Adds an unlinked id at the end of a chain; contains(id) holds from here on, so an id that
  // comes twice is seen.
  void extend(Chain& chain, BlockId id) {
    PYBLOCKPOOL_EXPECT(!contains(id));
    if (chain.size == 0) {
      chain.first = id;
    } else {
      join(chain.last, id);
    }
    at(id).next = kEnd;
    chain.last = id;
    ++chain.size;
    if (looks_ahead()) {
      BlockId& earlier = recent_[extended_++ % kAhead];
      ahead_[index(earlier)] = id;
      earlier = id;
    }
  }

  // The same for an id that may be anything: false, with nothing changed, unless it is an unlinked
  // id of this list with this payload.
  bool try_extend(Chain& chain, std::int64_t id, const void* payload) {
    if (static_cast<std::uint64_t>(id) >= capacity()) return false;
    const BlockId known = static_cast<BlockId>(id);
    const Links& links = at(known);
    if (links.payload != payload || links.next != kUnlinked) return false;
    extend(chain, known);
    return true;
  }

  void splice_front(const Chain& chain) {
    if (chain.size == 0) return;
    join(chain.last, front());
    join(kEnd, chain.first);
    size_ += chain.size;
  }

  void splice_back(const Chain& chain) {
    if (chain.size == 0) return;
    join(back(), chain.first);
    join(chain.last, kEnd);
    size_ += chain.size;
  }

  void dissolve(const Chain& chain) {
    BlockId id = chain.first;
    for (std::size_t i = 0; i < chain.size; ++i) id = unchain(id);
  }

  // Unlinks the first id of a chain (or of the list, whose end is then joined anew) and returns
  // what is behind it.
  BlockId unchain(BlockId id) {
    const BlockId after = next(id);
    at(id).next = kUnlinked;
    return after;
  }

  // Canonical order: ascending ids. One pass over the array, no sort.
  void sort_by_id() {
    BlockId last = kEnd;
    for (std::size_t i = 1; i < links_.size(); ++i) {
      if (links_[i].next < kEnd) continue;
      const BlockId id = static_cast<BlockId>(i) - 1;
      join(last, id);
      last = id;
    }
    join(last, kEnd);
  }

  // The first broken rule as text, "" if all hold. O(capacity), allocates only to report.
  std::string check() const {
    std::size_t walked = 0;
    for (BlockId id = kEnd;;) {
      const BlockId after = next(id);
      if (after < kEnd || static_cast<std::size_t>(after + 1) >= links_.size()) {
        return "the link after id " + std::to_string(id) + " leads to " + std::to_string(after) +
               ", outside the list";
      }
      if (prev(after) != id) {
        return "id " + std::to_string(after) + " follows id " + std::to_string(id) +
               " but links back to " + std::to_string(prev(after));
      }
      if (after == kEnd) break;
      if (++walked > size_) break;
      id = after;
    }
    if (walked != size_) {
      return "the list says " + std::to_string(size_) + " ids but a walk finds " +
             (walked > size_ ? "more" : std::to_string(walked));
    }
    if (looks_ahead() && ahead_.size() < links_.size()) return "there is no room to look ahead";
    for (const BlockId id : ahead_) {
      if (id < kEnd || index(id) >= links_.size()) {
        return "the hint " + std::to_string(id) + " is outside the list";
      }
    }
    std::size_t linked = 0;
    for (std::size_t i = 1; i < links_.size(); ++i) {
      linked += links_[i].next >= kEnd ? 1U : 0U;
    }
    if (linked != size_) {
      return std::to_string(linked) + " ids carry links but the list has " + std::to_string(size_);
    }
    return {};
  }

 private:
  friend struct BrokenFreeList;  // tests that check() notices

  static constexpr BlockId kUnlinked = -2;
  static constexpr BlockId kAside = -3;

  struct Links {
    BlockId prev;
    BlockId next;
    void* payload;
  };

  static std::size_t index(BlockId id) { return static_cast<std::size_t>(id + 1); }

  Links& at(BlockId id) {
    PYBLOCKPOOL_EXPECT(id >= kEnd && index(id) < links_.size());
    return links_[index(id)];
  }
  const Links& at(BlockId id) const {
    PYBLOCKPOOL_EXPECT(id >= kEnd && index(id) < links_.size());
    return links_[index(id)];
  }

  bool looks_ahead() const { return !ahead_.empty(); }

  // At least twice what there was, so that ids may come one by one.
  template <class T>
  static void reserve_in(std::vector<T>& items, std::size_t count) {
    if (count > items.capacity()) items.reserve(std::max(count, 2 * items.capacity()));
  }

  void join(BlockId before, BlockId after) {
    at(before).next = after;
    at(after).prev = before;
  }

  std::vector<Links> links_;
  std::size_t size_ = 0;
  // If somebody looks ahead: by id, the one that was chained kAhead later. A walk along the links
  // waits for memory at each step, unless it knows what is coming. Only a hint, of no consequence
  // where ids have left in between.
  static constexpr std::size_t kAhead = 16;
  std::vector<BlockId> ahead_;
  BlockId recent_[kAhead] = {};
  std::size_t extended_ = 0;
};

}  // namespace pyblockpool
