// LRU over aligned extents of block ids, with growth in place: policies `sorted` (extents of one
// block) and `extent`. After reservation-based superpage allocation (Navarro et al., OSDI 2002).
// The words are those of pyblockpool.reference.ExtentOrder. Knows neither Python nor vLLM.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "free_list.hpp"
#include "id_bitmap.hpp"
#include "run_set.hpp"

namespace pyblockpool {

// Extent k is the ids kE ... kE+E-1. Between two calls:
//
//   id is spendable                <=>  spendable_.test(id)  <=>  cached_.is_aside(id)
//   id is cached                   <=>  id is in the list cached_, longest free first
//   extents_[k].free, .cached       =   how many ids of k are spendable or cached; cached
//   k is clean  (free == E, cached == 0)           <=>  clean_.test(k)
//   k is aged   (free == E, cached > 0)            <=>  k is in the list aged_
//   k is aged, cached < E, tails are packed        <=>  k is in the list roomy_
//   (both: longest whole first; what is cached in the aged extents outside roomy_ is at_once_)
//   k is partly spendable (free < E, free - cached == g > 0)   <=>  parts_[g].test(k)
//   parts_[g] has a member                         <=>  most_.test(g)
//
// What is not an id of the list (never seen, or the rest of the last extent) is never free. With
// E == 1 the first two rules are all there is: an extent is an id, clean is spendable, and cached_
// is the list of the aged ones.
class ExtentList {
 public:
  // `list` keeps the cached ids in order and the payloads of all of them; it outlives this.
  ExtentList(FreeList& list, BlockId extent_size, bool pack_tails)
      : cached_(list), size_(extent_size), pack_tails_(pack_tails) {
    while ((BlockId{1} << shift_) < size_) ++shift_;
    parts_.resize(static_cast<std::size_t>(size_));
    most_.grow(static_cast<std::size_t>(size_));
    if (size_ == 1) cached_.look_ahead();
    grow(list.capacity());
  }

  BlockId extent_size() const { return size_; }
  bool pack_tails() const { return pack_tails_; }
  std::size_t size() const { return cached_.size() + spendable_.count(); }
  std::size_t unhashed() const { return spendable_.count(); }
  std::size_t clean() const { return size_ == 1 ? spendable_.count() : clean_.count(); }
  std::size_t aged() const { return size_ == 1 ? cached_.size() : aged_.size(); }
  std::int64_t early_evictions() const { return early_evictions_; }
  std::int64_t shortages() const { return shortages_; }

  // Makes room for the ids 0 ... capacity-1; the list has to follow. Throws std::bad_alloc; what
  // has grown by then does no harm.
  void grow(std::size_t capacity) {
    if (capacity <= capacity_) return;
    const std::size_t extents = (capacity + static_cast<std::size_t>(size_) - 1) >> shift_;
    if (size_ > 1) {
      clean_.grow(extents);
      for (std::size_t g = 1; g < parts_.size(); ++g) parts_[g].grow(extents);
      aged_.grow(extents);
      roomy_.grow(extents);
      extents_.resize(extents);
    }
    spendable_.grow(capacity);
    capacity_ = capacity;
  }

  // Makes room to take `count` ids: take() then allocates nothing. Throws std::bad_alloc with
  // nothing changed.
  void reserve(std::size_t count) {
    std::vector<BlockId>& numbers = size_ == 1 ? singles_ : opened_;
    const std::size_t most = (count >> shift_) + 2;
    numbers.reserve(most);
    spare_.reserve(most);
  }

  // Takes `count` ids, which must be there, beside the id `after` unless that is kEnd: puts their
  // payloads into `out` and calls visit(payload) for each, as FreeList::pop_front_n does. Returns
  // the last id.
  template <class Visit>
  BlockId take(std::size_t count, BlockId after, void** out, Visit visit) {
    PYBLOCKPOOL_EXPECT(count > 0 && count <= size());
    Taken<Visit> taken{cached_, out, visit};
    if (size_ == 1) {
      take_singles(count, taken);
    } else {
      take_beside(count, after, taken);
    }
    taken.finish();
    return taken.last;
  }

  void remove(BlockId id) {
    const bool is_spendable = cached_.is_aside(id);
    if (size_ > 1) {
      const BlockId k = extent_of(id);
      unfile(k);
      --at(k).free;
      if (!is_spendable) --at(k).cached;
      file(k);
    }
    if (is_spendable) {
      spend(id);
    } else {
      cached_.remove(id);
    }
  }

  // A chain of unqueued ids becomes cached, in this order.
  void add_cached(const Chain& chain) {
    const BlockId behind = cached_.back();
    cached_.splice_back(chain);
    if (size_ == 1) return;
    BlockId id = cached_.next(behind);
    for (std::size_t i = 0; i < chain.size;) {
      const BlockId k = extent_of(id);
      const int count = walk_extent(k, id, chain.size - i);
      i += static_cast<std::size_t>(count);
      // Only an extent that becomes whole changes its place.
      const bool whole = at(k).free + count == size_;
      if (whole) unfile(k);
      at(k).free = static_cast<std::int16_t>(at(k).free + count);
      at(k).cached = static_cast<std::int16_t>(at(k).cached + count);
      if (whole) file(k);
    }
  }

  // A chain of unqueued ids becomes spendable.
  void add_unhashed(const Chain& chain) {
    BlockId id = chain.first;
    for (std::size_t i = 0; i < chain.size;) {
      const BlockId k = extent_of(id);
      std::int16_t count = 0;
      do {
        const BlockId after = cached_.unchain(id);
        give(id);
        ++count;
        id = after;
      } while (++i < chain.size && extent_of(id) == k);
      if (size_ == 1) continue;
      unfile(k);
      at(k).free = static_cast<std::int16_t>(at(k).free + count);
      file(k);
    }
  }

  // All cached ids become spendable.
  void forget_hashes() {
    shared_ = kEnd;
    while (cached_.size() > 0) {
      const BlockId id = cached_.pop_front();
      if (size_ > 1) {
        const BlockId k = extent_of(id);
        unfile(k);
        --at(k).cached;
        file(k);
      }
      give(id);
    }
  }

  // The walk is the order in which single ids without a hint would be taken, to the last one:
  //
  //   the extents, ids ascending:  the shared one, what is spendable of it
  //                                clean ones, shortest run first, lowest first
  //                                where tails are packed, aged ones that have room, what is
  //                                spendable of them; the last to become whole first
  //                                the other aged ones, longest whole first
  //                                the others, what is spendable of them: those with most of it
  //                                first, lowest first
  //   the fragments:               the other cached ids, longest free first
  //
  // With E == 1 the spendable ids, ascending, and the cached ones, longest free first.
  //
  // The id behind a free one in the walk. kEnd stands for both ends. A few steps, except that the
  // list of cached ids is passed one by one between two fragments, and that of aged extents between
  // two that have no room.
  BlockId after(BlockId id) const {
    PYBLOCKPOOL_EXPECT(id == kEnd || cached_.contains(id));
    if (size_ == 1) return single_after(id);
    if (is_fragment(id)) return fragment_after(id);
    BlockId k = kEnd;
    if (id != kEnd) {
      k = extent_of(id);
      const BlockId beside = lowest_of(k, id + 1);
      if (beside != kEnd) return beside;
    }
    k = extent_after(k);
    return k == kEnd ? fragment_after(kEnd) : lowest_of(k, k << shift_);
  }

  // The id before a free one in the walk.
  BlockId before(BlockId id) const {
    PYBLOCKPOOL_EXPECT(id == kEnd || cached_.contains(id));
    if (size_ == 1) return single_before(id);
    BlockId k = kEnd;
    if (id == kEnd || is_fragment(id)) {
      const BlockId fragment = fragment_before(id);
      if (fragment != kEnd) return fragment;
    } else {
      k = extent_of(id);
      const BlockId beside = highest_of(k, id - 1);
      if (beside != kEnd) return beside;
    }
    k = extent_before(k);
    return k == kEnd ? kEnd : highest_of(k, end_of(k) - 1);
  }

  // The first broken rule as text, "" if all hold. O(capacity).
  std::string check() const {
    if (size_ == 1) return check_singles();
    std::size_t spendable = 0;
    std::size_t num_aged = 0;
    std::size_t at_once = 0;
    std::size_t cached = 0;
    for (BlockId k = 0; static_cast<std::size_t>(k) < extents_.size(); ++k) {
      Extent found{0, 0};
      const BlockId end = end_of(k);
      for (BlockId id = k << shift_; id < end; ++id) {
        if (spendable_.test(id) != cached_.is_aside(id)) {
          return "id " + std::to_string(id) + " is spendable in one place only";
        }
        if (!cached_.contains(id)) continue;
        ++found.free;
        if (spendable_.test(id)) {
          ++spendable;
        } else {
          ++found.cached;
          ++cached;
        }
      }
      const Extent& told = extents_[static_cast<std::size_t>(k)];
      if (found.free != told.free || found.cached != told.cached) {
        return "extent " + std::to_string(k) + " says " + std::to_string(told.free) + " free, " +
               std::to_string(told.cached) + " cached, but has " + std::to_string(found.free) +
               " and " + std::to_string(found.cached);
      }
      const bool whole = told.free == size_;
      if (clean_.test(k) != (whole && told.cached == 0)) {
        return "extent " + std::to_string(k) + " is clean in one place only";
      }
      if (aged_.contains(k) != (whole && told.cached > 0)) {
        return "extent " + std::to_string(k) + " is aged in one place only";
      }
      if (roomy_.contains(k) != has_room(k)) {
        return "extent " + std::to_string(k) + " has room in one place only";
      }
      num_aged += whole && told.cached > 0 ? 1U : 0U;
      at_once += goes_at_once(k) ? static_cast<std::size_t>(told.cached) : 0U;
      const int part = whole ? 0 : told.free - told.cached;
      for (std::size_t g = 1; g < parts_.size(); ++g) {
        if (parts_[g].test(k) != (static_cast<int>(g) == part)) {
          return "extent " + std::to_string(k) + " is filed under " + std::to_string(g) +
                 " spendable ids but has " + std::to_string(part);
        }
      }
    }
    for (std::size_t g = 1; g < parts_.size(); ++g) {
      if ((parts_[g].count() > 0) != most_.test(static_cast<BlockId>(g))) {
        return "the number of spendable ids " + std::to_string(g) + " is noted wrongly";
      }
    }
    if (spendable != spendable_.count() || cached != cached_.size() || num_aged != aged() ||
        at_once != at_once_) {
      return "the counts of spendable and cached ids or of aged extents are wrong";
    }
    if (shared_ != kEnd && is_whole(shared_)) return "the shared extent is whole";
    for (const std::string& broken : {clean_.check(), aged_.check(), roomy_.check()}) {
      if (!broken.empty()) return broken;
    }
    return "";
  }

 private:
  struct Extent {
    std::int16_t free;
    std::int16_t cached;
  };

  // What has been handed out in one call. The visits run a few steps behind, so that what a payload
  // points to is loaded by then.
  template <class Visit>
  struct Taken {
    static constexpr std::size_t kBehind = 16;

    const FreeList& list;
    void** out;
    Visit& visit;
    std::size_t count = 0;
    BlockId last = kEnd;

    void add(BlockId id) {
      void* const payload = list.payload(id);
      PYBLOCKPOOL_PREFETCH(payload);
      out[count] = payload;
      if (count >= kBehind) visit(out[count - kBehind]);
      ++count;
      last = id;
    }

    void finish() {
      for (std::size_t i = count > kBehind ? count - kBehind : 0; i < count; ++i) visit(out[i]);
    }
  };

  BlockId extent_of(BlockId id) const { return id >> shift_; }
  BlockId end_of(BlockId k) const {
    return std::min((k + 1) << shift_, static_cast<BlockId>(cached_.capacity()));
  }
  Extent& at(BlockId k) { return extents_[static_cast<std::size_t>(k)]; }
  const Extent& at(BlockId k) const { return extents_[static_cast<std::size_t>(k)]; }

  std::string check_singles() const {
    std::size_t spendable = 0;
    for (BlockId id = 0; static_cast<std::size_t>(id) < cached_.capacity(); ++id) {
      if (spendable_.test(id) != cached_.is_aside(id)) {
        return "id " + std::to_string(id) + " is spendable in one place only";
      }
      spendable += spendable_.test(id) ? 1U : 0U;
    }
    return spendable == spendable_.count() ? "" : "the count of spendable ids is wrong";
  }

  // Moves `id`, the first of `left` ids that have come to the end of the list, behind those of them
  // that are of extent k, too; returns how many they are.
  int walk_extent(BlockId k, BlockId& id, std::size_t left) const {
    FreeList::Gap around{};
    if (at(k).free == 0 && left >= static_cast<std::size_t>(size_) && lies_together(k, around)) {
      id = around.after;
      return size_;
    }
    int count = 0;
    do {
      ++count;
      --left;
      id = cached_.next(id);
    } while (left > 0 && extent_of(id) == k);
    return count;
  }

  // Whether all ids of an extent are in the list side by side, as they are after a request that had
  // the whole of it.
  bool lies_together(BlockId k, FreeList::Gap& around) const {
    return end_of(k) == (k + 1) << shift_ && cached_.lie_together(k << shift_, size_, around);
  }

  // Out of the index in which its counts say that it is; and into it again.
  void unfile(BlockId k) {
    const Extent& extent = at(k);
    const int part = extent.free - extent.cached;
    if (extent.free == size_) {
      if (extent.cached > 0) {
        aged_.remove(k);
        unlist_aged(k);
      } else {
        clean_.reset(k);
      }
    } else if (part > 0) {
      IdBitmap& alike = parts_[static_cast<std::size_t>(part)];
      alike.reset(k);
      if (alike.count() == 0) most_.reset(part);
    }
  }

  void unlist_aged(BlockId k) {
    if (has_room(k)) {
      roomy_.remove(k);
    } else {
      at_once_ -= static_cast<std::size_t>(at(k).cached);
    }
  }

  void file(BlockId k) {
    const Extent& extent = at(k);
    const int part = extent.free - extent.cached;
    if (extent.free == size_) {
      if (extent.cached > 0) {
        aged_.push_back(k);
        if (has_room(k)) {
          roomy_.push_back(k);
        } else {
          at_once_ += static_cast<std::size_t>(extent.cached);
        }
      } else {
        clean_.set(k);
      }
      if (shared_ == k) shared_ = kEnd;
    } else if (part > 0) {
      IdBitmap& alike = parts_[static_cast<std::size_t>(part)];
      if (alike.count() == 0) most_.set(part);
      alike.set(k);
    }
  }

  // See reference.ExtentOrder.take.
  template <class Visit>
  void take_beside(std::size_t count, BlockId after, Taken<Visit>& taken) {
    const bool single = count == 1 && after == kEnd;
    const bool may_pack = pack_tails_ && (after == kEnd || count > 1);
    if (single && shared_ != kEnd) spend_lowest(shared_, 1, taken);
    if (after != kEnd) grow_after(after, count, taken);
    if (taken.count == count) return;
    const std::size_t over = (count - taken.count) & static_cast<std::size_t>(size_ - 1);
    const std::size_t whole = count - taken.count - over;
    BlockId room = kEnd;
    if (may_pack && over > 0 && clean_.count() <= whole >> shift_) room = room_for(over);
    if (room != kEnd) {
      unfile(room);  // so that it is not opened
      open(whole);
    } else {
      open(whole + over);
    }
    for (const BlockId k : opened_) move_in(k, count - taken.count, taken);
    if (single && !opened_.empty()) shared_ = opened_.front();
    if (room != kEnd) {
      spend_in(room, over, taken);
      file(room);
      if (single) shared_ = room;
    }
    if (taken.count == count) return;
    ++shortages_;
    while (taken.count < count) {
      const BlockId most = most_.highest();
      if (most != kEnd) {
        const BlockId fullest = parts_[static_cast<std::size_t>(most)].next(0);
        spend_lowest(fullest, count - taken.count, taken);
        if (single) shared_ = fullest;
      } else {
        const BlockId id = cached_.pop_front();
        --at(extent_of(id)).free;
        --at(extent_of(id)).cached;
        taken.add(id);
      }
    }
  }

  // The aged extent, of the last few that have room, that has it for `count` ids; kEnd if none has.
  BlockId room_for(std::size_t count) const {
    BlockId k = roomy_.back();
    for (int looks = 0; k != kEnd && looks < kRoomLooks; ++looks, k = roomy_.prev(k)) {
      if (static_cast<std::size_t>(spendable_in(k)) >= count) return k;
    }
    return kEnd;
  }

  // The lowest spendable ids, then the cached ones, longest free first; ascending.
  template <class Visit>
  void take_singles(std::size_t count, Taken<Visit>& taken) {
    singles_.clear();
    for (BlockId id = spendable_.next(0); id != kEnd && singles_.size() < count;
         id = spendable_.next(id + 1)) {
      spend(id);
      singles_.push_back(id);
    }
    cached_.pop_front_each(count - singles_.size(), [this](BlockId id, void* payload) {
      PYBLOCKPOOL_PREFETCH(payload);
      singles_.push_back(id);
    });
    sort(singles_);
    for (const BlockId id : singles_) taken.add(id);
  }

  template <class Visit>
  void grow_after(BlockId after, std::size_t count, Taken<Visit>& taken) {
    const BlockId k = extent_of(after);
    const BlockId stop = end_of(k);
    if (after + 1 >= stop || !cached_.is_aside(after + 1)) return;
    unfile(k);
    for (BlockId id = after + 1; id < stop && taken.count < count && cached_.is_aside(id); ++id) {
      spend(id);
      --at(k).free;
      taken.add(id);
    }
    file(k);
  }

  // Takes whole extents for `count` ids out of their indexes, as far as there are any, into
  // opened_, ascending: clean ones in as few pieces as they come, then aged ones, longest whole
  // first. What is cached in them is given up, longest whole first: it is in the list no more.
  void open(std::size_t count) {
    const std::size_t wanted = (count + static_cast<std::size_t>(size_) - 1) >> shift_;
    const auto add = [this, count](BlockId k) {
      opened_.push_back(k);
      // Extents are moved into faster than memory follows, so what their payloads point to begins
      // to load here.
      const auto some = static_cast<BlockId>(std::min(count, static_cast<std::size_t>(size_)));
      const BlockId first = k << shift_;
      for (BlockId id = first; id < first + some; ++id) PYBLOCKPOOL_PREFETCH(cached_.payload(id));
    };
    opened_.clear();
    while (clean_.count() > 0 && opened_.size() < wanted) {
      const std::size_t left = wanted - opened_.size();
      const RunSet::Run run = clean_.take(clean_.best(left), left);
      for (BlockId k = run.first; k < run.first + run.length; ++k) add(k);
    }
    while (aged_.size() > 0 && opened_.size() < wanted) {
      const BlockId k = aged_.pop_front();
      unlist_aged(k);
      give_up_cached(k);
      add(k);
    }
    sort(opened_);
  }

  // Takes the cached ids of an opened extent out of their list. The longest stretch of them there
  // leaves in its turn, the others leave early, for their neighbours' sake.
  void give_up_cached(BlockId k) {
    FreeList::Gap around{};
    if (at(k).cached == size_ && lies_together(k, around)) {
      cached_.remove_together(k << shift_, size_, around);
      return;
    }
    std::size_t left = static_cast<std::size_t>(at(k).cached);
    early_evictions_ += at(k).cached;
    std::int64_t longest = 0;
    for (BlockId id = k << shift_; left > 0; ++id) {
      if (!cached_.contains(id) || cached_.is_aside(id)) continue;
      BlockId first = id;
      while (extent_of(cached_.prev(first)) == k) first = cached_.prev(first);
      std::int64_t length = 0;
      for (BlockId after = first; extent_of(after) == k; ++length) {
        first = after;
        after = cached_.next(after);
        cached_.remove(first);
      }
      longest = std::max(longest, length);
      left -= static_cast<std::size_t>(length);
    }
    early_evictions_ -= longest;
  }

  // Takes the first `most` ids of an opened extent; the rest of it is spendable.
  template <class Visit>
  void move_in(BlockId k, std::size_t most, Taken<Visit>& taken) {
    const BlockId first = k << shift_;
    const auto count = static_cast<BlockId>(std::min(most, static_cast<std::size_t>(size_)));
    for (BlockId id = first; id < first + count; ++id) {
      if (cached_.is_aside(id)) spend(id);
      taken.add(id);
    }
    for (BlockId id = first + count; id < first + size_; ++id) {
      if (!cached_.is_aside(id)) give(id);
    }
    at(k) = Extent{static_cast<std::int16_t>(size_ - count), 0};
    file(k);
  }

  // Ascending; digit by digit, with no comparison to guess wrong, where there are enough of them.
  void sort(std::vector<BlockId>& numbers) {
    if (std::is_sorted(numbers.begin(), numbers.end())) return;
    if (numbers.size() < 64) {
      std::sort(numbers.begin(), numbers.end());
      return;
    }
    constexpr int kBits = 9;
    const std::size_t largest = capacity_ >> shift_;
    spare_.resize(numbers.size());
    for (int shift = 0; largest >> shift != 0; shift += kBits) {
      std::array<std::uint32_t, 1U << kBits> place{};
      const auto digit = [shift](BlockId number) {
        return static_cast<std::size_t>(number >> shift) & ((1U << kBits) - 1);
      };
      for (const BlockId number : numbers) ++place[digit(number)];
      std::uint32_t before = 0;
      for (std::uint32_t& each : place) before += std::exchange(each, before);
      for (const BlockId number : numbers) spare_[place[digit(number)]++] = number;
      numbers.swap(spare_);
    }
  }

  // Takes up to `most` spendable ids of an extent that is not whole.
  template <class Visit>
  void spend_lowest(BlockId k, std::size_t most, Taken<Visit>& taken) {
    unfile(k);
    spend_in(k, most, taken);
    file(k);
  }

  // The same of one that is in no index.
  template <class Visit>
  void spend_in(BlockId k, std::size_t most, Taken<Visit>& taken) {
    const BlockId end = end_of(k);
    for (BlockId id = spendable_.next(k << shift_); id != kEnd && id < end && most > 0; --most) {
      spend(id);
      --at(k).free;
      taken.add(id);
      id = spendable_.next(id + 1);
    }
  }

  void spend(BlockId id) {
    spendable_.reset(id);
    cached_.take_back(id);
  }

  void give(BlockId id) {
    cached_.set_aside(id);
    spendable_.set(id);
  }

  bool is_whole(BlockId k) const { return at(k).free == size_; }
  bool is_clean(BlockId k) const { return is_whole(k) && at(k).cached == 0; }
  bool is_aged(BlockId k) const { return is_whole(k) && at(k).cached > 0; }
  // Aged extents that have room lose their spendable ids first; the others go at once.
  bool has_room(BlockId k) const { return pack_tails_ && is_aged(k) && at(k).cached < size_; }
  bool goes_at_once(BlockId k) const { return is_aged(k) && !has_room(k); }
  int spendable_in(BlockId k) const { return at(k).free - at(k).cached; }

  bool is_fragment(BlockId id) const {
    return id != kEnd && !goes_at_once(extent_of(id)) && !cached_.is_aside(id);
  }

  // See after(). In each of these functions, too, kEnd stands for both ends.
  BlockId single_after(BlockId id) const {
    if (id == kEnd || cached_.is_aside(id)) {
      id = spendable_.next(id + 1);
      if (id != kEnd) return id;
    }
    return cached_.next(id);
  }

  BlockId single_before(BlockId id) const {
    if (id != kEnd && cached_.is_aside(id)) return spendable_.previous(id - 1);
    id = cached_.prev(id);
    return id == kEnd ? spendable_.highest() : id;
  }

  BlockId fragment_after(BlockId id) const {
    if (!has_fragments()) return kEnd;
    do {
      id = cached_.next(id);
    } while (id != kEnd && goes_at_once(extent_of(id)));
    return id;
  }

  BlockId fragment_before(BlockId id) const {
    if (!has_fragments()) return kEnd;
    do {
      id = cached_.prev(id);
    } while (id != kEnd && goes_at_once(extent_of(id)));
    return id;
  }

  bool has_fragments() const { return cached_.size() > at_once_; }

  // The extent behind is the next one of the same section of the walk. Where that has no more, k is
  // kEnd from there on, and the first one of the next section follows.
  BlockId extent_after(BlockId k) const {
    if (k == kEnd && shares()) return shared_;
    if (k == shared_) k = kEnd;
    if (k == kEnd || is_clean(k)) {
      k = clean_.after(k);
      if (k != kEnd) return k;
    }
    if (k == kEnd || has_room(k)) {
      k = roomy_.prev(k);
      if (k != kEnd) return k;
    }
    if (k == kEnd || goes_at_once(k)) {
      do {
        k = aged_.next(k);
      } while (k != kEnd && !goes_at_once(k));
      if (k != kEnd) return k;
    }
    do {
      k = part_after(k);
    } while (k != kEnd && k == shared_);
    return k;
  }

  BlockId extent_before(BlockId k) const {
    if (k != kEnd && k == shared_) return kEnd;
    if (k == kEnd || !is_whole(k)) {
      do {
        k = part_before(k);
      } while (k != kEnd && k == shared_);
      if (k != kEnd) return k;
    }
    if (k == kEnd || goes_at_once(k)) {
      do {
        k = aged_.prev(k);
      } while (k != kEnd && !goes_at_once(k));
      if (k != kEnd) return k;
    }
    if (k == kEnd || has_room(k)) {
      k = roomy_.next(k);
      if (k != kEnd) return k;
    }
    k = clean_.before(k);
    if (k != kEnd) return k;
    return shares() ? shared_ : kEnd;
  }

  bool shares() const { return shared_ != kEnd && spendable_in(shared_) > 0; }

  // Among all extents that are partly spendable.
  BlockId part_after(BlockId k) const {
    BlockId part = most_.highest();
    if (k != kEnd) {
      part = spendable_in(k);
      const BlockId alike = parts_[static_cast<std::size_t>(part)].next(k + 1);
      if (alike != kEnd) return alike;
      part = most_.previous(part - 1);
    }
    return part == kEnd ? kEnd : parts_[static_cast<std::size_t>(part)].next(0);
  }

  BlockId part_before(BlockId k) const {
    BlockId part = most_.next(0);
    if (k != kEnd) {
      part = spendable_in(k);
      const BlockId alike = parts_[static_cast<std::size_t>(part)].previous(k - 1);
      if (alike != kEnd) return alike;
      part = most_.next(part + 1);
    }
    return part == kEnd ? kEnd : parts_[static_cast<std::size_t>(part)].highest();
  }

  // The lowest id of an extent, from `from` on, that is not left to the fragments; kEnd if there is
  // none.
  BlockId lowest_of(BlockId k, BlockId from) const {
    const BlockId end = end_of(k);
    if (from < end && !goes_at_once(k)) from = spendable_.next(from);
    return from < end ? from : kEnd;
  }

  BlockId highest_of(BlockId k, BlockId from) const {
    const BlockId begin = k << shift_;
    if (from >= begin && !goes_at_once(k)) from = spendable_.previous(from);
    return from >= begin ? from : kEnd;
  }

  FreeList& cached_;
  const BlockId size_;
  const bool pack_tails_;
  int shift_ = 0;
  std::size_t capacity_ = 0;
  IdBitmap spendable_;
  std::vector<Extent> extents_;
  RunSet clean_;
  FreeList aged_;
  static constexpr int kRoomLooks = 16;
  FreeList roomy_;
  // Cached ids in aged extents that have no room.
  std::size_t at_once_ = 0;
  // By the number of spendable ids, 1 ... E-1.
  std::vector<IdBitmap> parts_;
  IdBitmap most_;
  // The extent that single ids without a hint share, kEnd if they have to open one.
  BlockId shared_ = kEnd;
  std::int64_t early_evictions_ = 0;
  std::int64_t shortages_ = 0;
  // Of one call.
  std::vector<BlockId> opened_;
  std::vector<BlockId> singles_;
  std::vector<BlockId> spare_;
};

}  // namespace pyblockpool
