// The C++ list against std::list, step by step. Built with PYBLOCKPOOL_INTERNAL_CHECKS it also
// proves that no precondition is broken on the way.
#include "free_list.hpp"

#include <iostream>
#include <string>

#include "choices.hpp"
#include "free_list_program.hpp"
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
using pyblockpool::require_same;

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
  for (unsigned seed = 0; seed < 40; ++seed) {
    SeededChoices choices(seed, 2000);
    pyblockpool::free_list_program(choices, seed % 2 == 1, "seed " + std::to_string(seed));
  }
  std::cout << "free_list: all programs agree with std::list\n";
}
