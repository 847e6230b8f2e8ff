// A random program for the list of ids, compared with std::list after every step.
#pragma once

#include <algorithm>
#include <iterator>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "choices.hpp"
#include "free_list.hpp"
#include "require.hpp"

namespace pyblockpool {

inline std::vector<BlockId> order_of(const FreeList& list) {
  std::vector<BlockId> order;
  for (BlockId id = list.front(); id != kEnd; id = list.next(id)) order.push_back(id);
  return order;
}

inline void require_same(const FreeList& list, const std::list<BlockId>& expected,
                         const std::string& after) {
  require(list.check().empty(), after + ": " + list.check());
  require(list.size() == expected.size(), after + ": size");
  require(order_of(list) == std::vector<BlockId>(expected.begin(), expected.end()),
          after + ": order");
  require(list.back() == (expected.empty() ? kEnd : expected.back()), after + ": back");
}

// Random operations, each rule checked and everything compared after each of them.
inline void free_list_program(Choices& choices, bool looks_ahead, const std::string& name) {
  std::vector<int> payloads(300);
  FreeList list;
  if (looks_ahead) list.look_ahead();
  std::list<BlockId> expected;
  std::vector<BlockId> in_use;
  const auto grow = [&] {
    const std::size_t before = list.capacity();
    list.grow(before + 1 + choices.below(20));
    for (std::size_t id = before; id < list.capacity(); ++id) {
      require(list.payload(static_cast<BlockId>(id)) == nullptr, "no payload at first");
      list.set_payload(static_cast<BlockId>(id), &payloads[id]);
      in_use.push_back(static_cast<BlockId>(id));
    }
  };
  grow();
  for (int step = 0; choices.another_step(); ++step) {
    std::string what = name + " step " + std::to_string(step) + " ";
    switch (choices.below(10)) {
      case 0:
        if (expected.empty()) continue;
        what += "pop_front";
        require(list.pop_front() == expected.front(), what);
        in_use.push_back(expected.front());
        expected.pop_front();
        break;
      case 1: {
        what += "pop_front_n";
        std::vector<void*> taken(choices.below(expected.size() + 1));
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
        const auto victim = std::next(expected.begin(),
                                      static_cast<std::ptrdiff_t>(choices.below(expected.size())));
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
        Chain chain;
        std::vector<BlockId> batch;
        for (std::size_t n = choices.below(in_use.size() + 1); n > 0; --n) {
          std::swap(in_use[choices.below(in_use.size())], in_use.back());
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
        switch (choices.below(3)) {
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
        const std::size_t count = choices.below(expected.size() + 1);
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
            static_cast<BlockId>(2 + choices.below(std::min<std::size_t>(list.capacity() - 1, 8)));
        const auto room = list.capacity() - static_cast<std::size_t>(count);
        const auto first = static_cast<BlockId>(choices.below(room + 1));
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

}  // namespace pyblockpool
