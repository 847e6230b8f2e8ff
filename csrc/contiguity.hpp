// Block tables -> figures of contiguity: pure functions over block ids. Knows neither Python nor
// vLLM. What each figure means: pyblockpool/contiguity.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "free_list.hpp"

namespace pyblockpool {

// In a table, this id stands for a position that is not kept: vLLM's null block.
inline constexpr BlockId kNullBlock = 0;

// An array of ids that belongs to somebody else.
struct IdSpan {
  const BlockId* ids = nullptr;
  std::size_t size = 0;

  BlockId operator[](std::size_t i) const {
    PYBLOCKPOOL_EXPECT(i < size);
    return ids[i];
  }
};

// Of one table, or sums over several, of which the longest run is the longest of all. What holds
// for each:
//
//   blocks - runs         =  the neighbours that continue a run  <=  neighbours
//   blocks - runs_either  =  those that continue one that may also fall
//   longest_run <= blocks,   runs_either <= runs
struct RunFigures {
  std::int64_t blocks = 0;
  std::int64_t neighbours = 0;
  std::int64_t runs = 0;
  std::int64_t runs_either = 0;
  std::int64_t longest_run = 0;

  void add(const RunFigures& other) {
    blocks += other.blocks;
    neighbours += other.neighbours;
    runs += other.runs;
    runs_either += other.runs_either;
    longest_run = std::max(longest_run, other.longest_run);
  }
};

// Likewise; the highest id is kEnd where there is no block.
struct TableFigures {
  RunFigures runs;
  std::int64_t tiles = 0;
  std::int64_t packed_tiles = 0;
  BlockId highest = kEnd;

  void add(const TableFigures& other) {
    runs.add(other.runs);
    tiles += other.tiles;
    packed_tiles += other.packed_tiles;
    highest = std::max(highest, other.highest);
  }
};

// Counts runs while the blocks of a table come one by one.
class RunCounter {
 public:
  // A block without a neighbour before it: the first, or one behind a position without a block.
  void begin() {
    ++figures_.blocks;
    begin_run();
    begin_either();
  }

  // A block whose id is so much above that of its neighbour.
  void go_on(std::int64_t step) {
    ++figures_.blocks;
    ++figures_.neighbours;
    if (step == 1) {
      figures_.longest_run = std::max(figures_.longest_run, ++length_);
    } else {
      begin_run();
    }
    // Where the direction turns, a run begins that may go either way again.
    if ((step == 1 || step == -1) && (direction_ == 0 || direction_ == step)) {
      direction_ = step;
    } else {
      begin_either();
    }
  }

  const RunFigures& figures() const { return figures_; }

 private:
  void begin_run() {
    length_ = 1;
    figures_.longest_run = std::max(figures_.longest_run, length_);
    ++figures_.runs;
  }

  void begin_either() {
    direction_ = 0;
    ++figures_.runs_either;
  }

  RunFigures figures_;
  std::int64_t length_ = 0;
  std::int64_t direction_ = 0;
};

inline void expect_block_id(BlockId id, std::size_t at) {
  if (id >= 0) return;
  throw std::invalid_argument("block ids go from 0 to 2147483647, not " + std::to_string(id) +
                              ": leave out what pads the table (position " + std::to_string(at) +
                              ")");
}

// How many different numbers there are, none below 0. Leaves them in any order.
inline std::int64_t count_distinct(std::vector<BlockId>& numbers) {
  if (numbers.empty()) return 0;
  // A mark for each number that could be, unless those would be far more than there are numbers.
  constexpr std::size_t kMarksPerNumber = 1024;
  const BlockId highest = *std::max_element(numbers.begin(), numbers.end());
  if (static_cast<std::size_t>(highest) / kMarksPerNumber >= numbers.size()) {
    std::sort(numbers.begin(), numbers.end());
    return std::unique(numbers.begin(), numbers.end()) - numbers.begin();
  }
  std::vector<std::uint64_t> marks(static_cast<std::size_t>(highest) / 64 + 1);
  std::int64_t count = 0;
  for (const BlockId number : numbers) {
    std::uint64_t& word = marks[static_cast<std::size_t>(number) / 64];
    const std::uint64_t mark = std::uint64_t{1} << (number % 64);
    count += (word & mark) == 0;
    word |= mark;
  }
  return count;
}

// The figures of a table. `scratch` is room that is used again from table to table. Each id is read
// once: should another thread write to the array meanwhile, the figures are those of some mix of
// ids. Throws std::invalid_argument for an id below 0 and a tile below 1.
inline TableFigures table_figures(IdSpan table, BlockId tile, std::vector<BlockId>& scratch) {
  if (tile < 1) throw std::invalid_argument("a tile has at least one block");
  const auto tile_size = static_cast<std::uint32_t>(tile);
  TableFigures figures;
  RunCounter runs;
  BlockId before = kNullBlock;
  std::uint32_t first_of_tile = 0;
  scratch.clear();
  for (std::size_t i = 0; i < table.size; ++i) {
    const BlockId id = table[i];
    expect_block_id(id, i);
    if (id != kNullBlock) {
      if (before == kNullBlock) {
        runs.begin();
      } else {
        runs.go_on(std::int64_t{id} - before);
      }
      figures.highest = std::max(figures.highest, id);
      // Most blocks of a run are in the tile of the one before: no division for them.
      if (scratch.empty() || static_cast<std::uint32_t>(id) - first_of_tile >= tile_size) {
        scratch.push_back(id / tile);
        first_of_tile = static_cast<std::uint32_t>(scratch.back() * tile);
      }
    }
    before = id;
  }
  figures.runs = runs.figures();
  figures.tiles = count_distinct(scratch);
  figures.packed_tiles = (figures.runs.blocks + tile - 1) / tile;
  return figures;
}

// The sums over tables that lie one behind the other in `ids`. Throws std::invalid_argument, beside
// what table_figures throws, where the lengths do not make up the ids.
inline TableFigures trace_figures(IdSpan ids, const std::int64_t* lengths, std::size_t tables,
                                  BlockId tile) {
  const std::invalid_argument mismatch("the lengths of the tables do not make up the block ids");
  TableFigures sums;
  std::vector<BlockId> scratch;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < tables; ++i) {
    const auto length = static_cast<std::size_t>(lengths[i]);  // below 0: far above any size
    if (length > ids.size - begin) throw mismatch;
    sums.add(table_figures({ids.ids + begin, length}, tile, scratch));
    begin += length;
  }
  if (begin != ids.size) throw mismatch;
  return sums;
}

// The blocks of one memory that are copied to another, in the order of the copy: neighbours
// continue a run where both ids make the same step. Here 0 is an id like any other. Throws
// std::invalid_argument for sides of different lengths and for an id below 0.
inline RunFigures copy_figures(IdSpan source, IdSpan destination) {
  if (source.size != destination.size) {
    throw std::invalid_argument("a copy has a destination for each source, not " +
                                std::to_string(destination.size) + " for " +
                                std::to_string(source.size));
  }
  RunCounter runs;
  std::int64_t from_before = 0;
  std::int64_t to_before = 0;
  for (std::size_t i = 0; i < source.size; ++i) {
    const BlockId from = source[i];
    const BlockId to = destination[i];
    expect_block_id(from, i);
    expect_block_id(to, i);
    if (i == 0) {
      runs.begin();
    } else {
      const std::int64_t step = from - from_before;
      runs.go_on(step == to - to_before ? step : 0);
    }
    from_before = from;
    to_before = to;
  }
  return runs.figures();
}

}  // namespace pyblockpool
