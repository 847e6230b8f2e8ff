// The C++ list against std::list, step by step. Built with PYBLOCKPOOL_INTERNAL_CHECKS it also
// proves that no precondition is broken on the way.
#include "free_list.hpp"

#include <algorithm>
#include <iostream>
#include <iterator>
#include <list>
#include <random>
#include <string>
#include <vector>

#include "require.hpp"

namespace pyblockpool {

// Breaks the rules of a list one at a time.
struct BrokenFreeList {
  static void set_next(FreeList& list, BlockId id, BlockId next) { list.at(id).next = next; }
  static void set_prev(FreeList& list, BlockId id, BlockId prev) { list.at(id).prev = prev; }
  static void set_size(FreeList& list, std::size_t size) { list.size_ = size; }
  static void set_hint(FreeList& list, BlockId id, BlockId hint) {
    list.ahead_[FreeList::index(id)] = hint;
  }
};

}  // namespace pyblockpool

namespace {

using pyblockpool::BlockId;
using pyblockpool::BrokenFreeList;
using pyblockpool::Chain;
using pyblockpool::FreeList;
using pyblockpool::kEnd;

std::vector<BlockId> order_of(const FreeList& list) {
  std::vector<BlockId> order;
  for (BlockId id = list.front(); id != kEnd; id = list.next(id)) order.push_back(id);
  return order;
}

void require_same(const FreeList& list, const std::list<BlockId>& expected,
                  const std::string& after) {
  require(list.check().empty(), after + ": " + list.check());
  require(list.size() == expected.size(), after + ": size");
  require(order_of(list) == std::vector<BlockId>(expected.begin(), expected.end()),
          after + ": order");
  require(list.back() == (expected.empty() ? kEnd : expected.back()), after + ": back");
}

void random_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&random](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
  };
  std::vector<int> payloads(300);
  FreeList list;
  if (seed % 2 == 1) list.look_ahead();
  std::list<BlockId> expected;
  std::vector<BlockId> in_use;
  const auto grow = [&] {
    const std::size_t before = list.capacity();
    list.grow(before + 1 + below(20));
    for (std::size_t id = before; id < list.capacity(); ++id) {
      require(list.payload(static_cast<BlockId>(id)) == nullptr, "no payload at first");
      list.set_payload(static_cast<BlockId>(id), &payloads[id]);
      in_use.push_back(static_cast<BlockId>(id));
    }
  };
  grow();
  for (int step = 0; step < 2000; ++step) {
    std::string what = "seed " + std::to_string(seed) + " step " + std::to_string(step) + " ";
    switch (below(10)) {
      case 0:
        if (expected.empty()) continue;
        what += "pop_front";
        require(list.pop_front() == expected.front(), what);
        in_use.push_back(expected.front());
        expected.pop_front();
        break;
      case 1: {
        what += "pop_front_n";
        std::vector<void*> taken(below(expected.size() + 1));
        std::vector<void*> visited;
        list.pop_front_n(taken.size(), taken.data(),
                         [&visited](void* payload) { visited.push_back(payload); });
        require(visited == taken, what);
        for (void* const payload : taken) {
          require(payload == &payloads[static_cast<std::size_t>(expected.front())], what);
          in_use.push_back(expected.front());
          expected.pop_front();
        }
        break;
      }
      case 2: {
        if (expected.empty()) continue;
        what += "remove";
        const auto victim =
            std::next(expected.begin(), static_cast<std::ptrdiff_t>(below(expected.size())));
        list.remove(*victim);
        in_use.push_back(*victim);
        expected.erase(victim);
        break;
      }
      case 3:
        if (in_use.empty()) continue;
        what += "push_back";
        list.push_back(in_use.back());
        expected.push_back(in_use.back());
        in_use.pop_back();
        break;
      case 4:
      case 5: {
        what += "splice";
        std::shuffle(in_use.begin(), in_use.end(), random);
        Chain chain;
        std::vector<BlockId> batch;
        for (std::size_t n = below(in_use.size() + 1); n > 0; --n) {
          batch.push_back(in_use.back());
          in_use.pop_back();
          require(!list.contains(batch.back()), what);
          void* const payload = &payloads[static_cast<std::size_t>(batch.back())];
          require(!list.try_extend(chain, batch.back(), nullptr), what);
          require(!list.try_extend(chain, -1, payload), what);
          require(!list.try_extend(chain, std::int64_t{1} << 40, payload), what);
          require(list.try_extend(chain, batch.back(), payload), what);
          require(!list.try_extend(chain, batch.back(), payload), what);
          require(list.contains(batch.back()), what);
        }
        switch (below(3)) {
          case 0:
            list.splice_front(chain);
            expected.insert(expected.begin(), batch.begin(), batch.end());
            break;
          case 1:
            list.splice_back(chain);
            expected.insert(expected.end(), batch.begin(), batch.end());
            break;
          default:
            list.dissolve(chain);
            in_use.insert(in_use.end(), batch.begin(), batch.end());
        }
        break;
      }
      case 6: {
        what += "pop_front_each";
        const std::size_t count = below(expected.size() + 1);
        std::size_t popped = 0;
        list.pop_front_each(count, [&](BlockId id, const void* payload) {
          require(id == expected.front(), what);
          require(payload == &payloads[static_cast<std::size_t>(id)], what);
          in_use.push_back(id);
          expected.pop_front();
          ++popped;
        });
        require(popped == count, what);
        break;
      }
      case 7: {
        what += "lie_together";
        if (list.capacity() < 2) continue;
        const auto count =
            static_cast<BlockId>(2 + below(std::min<std::size_t>(list.capacity() - 1, 8)));
        const auto room = list.capacity() - static_cast<std::size_t>(count);
        const auto first = static_cast<BlockId>(below(room + 1));
        const auto inside = [=](BlockId id) { return id >= first && id < first + count; };
        const auto begin = std::find_if(expected.begin(), expected.end(), inside);
        const auto end = std::find_if_not(begin, expected.end(), inside);
        FreeList::Gap around{};
        const bool together = list.lie_together(first, count, around);
        require(together == (std::distance(begin, end) == count), what);
        if (!together) continue;
        require(around.before == (begin == expected.begin() ? kEnd : *std::prev(begin)), what);
        require(around.after == (end == expected.end() ? kEnd : *end), what);
        what += ", remove_together";
        list.remove_together(first, count, around);
        in_use.insert(in_use.end(), begin, end);
        expected.erase(begin, end);
        break;
      }
      case 8:
        what += "sort_by_id";
        list.sort_by_id();
        expected.sort();
        break;
      default:
        what += "grow";
        if (list.capacity() < 200) grow();
    }
    require_same(list, expected, what);
  }
}

void empty_list() {
  FreeList list;
  require(list.front() == kEnd && list.back() == kEnd, "an empty list is its own end");
  list.sort_by_id();
  list.splice_front(Chain{});
  list.splice_back(Chain{});
  list.dissolve(Chain{});
  list.grow(0);
  require_same(list, {}, "empty");
}

template <class Break>
void require_noticed(Break break_it, const std::string& expected) {
  FreeList list;
  list.look_ahead();
  list.grow(6);
  for (const BlockId id : {4, 1, 3}) list.push_back(id);
  break_it(list);
  require(list.check() == expected, "check() says \"" + list.check() + "\"");
}

void broken_lists() {
  require_noticed([](FreeList& list) { BrokenFreeList::set_next(list, 1, 6); },
                  "the link after id 1 leads to 6, outside the list");
  require_noticed([](FreeList& list) { BrokenFreeList::set_next(list, 4, -2); },
                  "the link after id 4 leads to -2, outside the list");
  require_noticed([](FreeList& list) { BrokenFreeList::set_prev(list, 3, 4); },
                  "id 3 follows id 1 but links back to 4");
  require_noticed(
      [](FreeList& list) {
        BrokenFreeList::set_next(list, 3, 4);
        BrokenFreeList::set_prev(list, 4, 3);
      },
      "id 4 follows id -1 but links back to 3");
  require_noticed([](FreeList& list) { BrokenFreeList::set_size(list, 2); },
                  "the list says 2 ids but a walk finds more");
  require_noticed([](FreeList& list) { BrokenFreeList::set_size(list, 4); },
                  "the list says 4 ids but a walk finds 3");
  require_noticed([](FreeList& list) { BrokenFreeList::set_next(list, 5, 5); },
                  "4 ids carry links but the list has 3");
  require_noticed([](FreeList& list) { BrokenFreeList::set_hint(list, 2, 6); },
                  "the hint 6 is outside the list");
}

}  // namespace

int main() {
  empty_list();
  broken_lists();
  for (unsigned seed = 0; seed < 40; ++seed) random_program(seed);
  std::cout << "free_list: all programs agree with std::list\n";
}
