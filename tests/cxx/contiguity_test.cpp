// The figures of tables against slow definitions.
#include "contiguity.hpp"

#include <functional>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "require.hpp"

namespace {

using pyblockpool::BlockId;
using pyblockpool::copy_figures;
using pyblockpool::count_distinct;
using pyblockpool::IdSpan;
using pyblockpool::RunFigures;
using pyblockpool::table_figures;
using pyblockpool::TableFigures;
using pyblockpool::trace_figures;

using Ids = std::vector<BlockId>;

IdSpan span_of(const Ids& ids) { return {ids.data(), ids.size()}; }

TableFigures figures_of(const Ids& ids, BlockId tile) {
  Ids scratch;
  return table_figures(span_of(ids), tile, scratch);
}

void require_same(const RunFigures& a, const RunFigures& b, const std::string& what) {
  require(a.blocks == b.blocks, what + ": blocks");
  require(a.neighbours == b.neighbours, what + ": neighbours");
  require(a.runs == b.runs, what + ": runs");
  require(a.runs_either == b.runs_either, what + ": runs in either direction");
  require(a.longest_run == b.longest_run, what + ": longest run");
}

// Step by step, from the neighbours of each block. A step is 0 where no run goes on.
RunFigures defined(const std::vector<bool>& is_block, const std::vector<std::int64_t>& step) {
  RunFigures figures;
  std::int64_t length = 0;
  std::int64_t direction = 0;
  for (std::size_t i = 0; i < is_block.size(); ++i) {
    if (!is_block[i]) continue;
    const bool has_neighbour = i > 0 && is_block[i - 1];
    const std::int64_t by = has_neighbour ? step[i] : 0;
    ++figures.blocks;
    figures.neighbours += has_neighbour;
    length = by == 1 ? length + 1 : 1;
    figures.runs += by != 1;
    figures.longest_run = std::max(figures.longest_run, length);
    const bool goes_on = (by == 1 && direction >= 0) || (by == -1 && direction <= 0);
    direction = goes_on ? by : 0;
    figures.runs_either += !goes_on;
  }
  return figures;
}

// Stretches that rise, fall, stand still and jump, with null blocks among them.
Ids random_table(std::mt19937& random, BlockId most) {
  Ids ids;
  for (auto stretches = random() % 12; stretches > 0; --stretches) {
    auto id = static_cast<BlockId>(random() % static_cast<unsigned>(most));
    const auto step = static_cast<BlockId>(random() % 5) - 2;
    for (auto length = 1 + random() % 9; length > 0; --length) {
      ids.push_back(id);
      if (id + step < 0 || id > most) break;
      id += step;
    }
    if (random() % 4 == 0) ids.push_back(0);
  }
  return ids;
}

void random_tables(unsigned seed, BlockId most, BlockId tile) {
  std::mt19937 random(seed);
  Ids all;
  std::vector<std::int64_t> lengths;
  TableFigures sums;
  for (int i = 0; i < 200; ++i) {
    const std::string what = "seed " + std::to_string(seed) + " table " + std::to_string(i);
    const Ids ids = random_table(random, most);
    std::vector<bool> is_block;
    std::vector<std::int64_t> step(1);
    std::set<BlockId> tiles;
    BlockId highest = pyblockpool::kEnd;
    for (std::size_t k = 0; k < ids.size(); ++k) {
      is_block.push_back(ids[k] != 0);
      if (k > 0) step.push_back(std::int64_t{ids[k]} - ids[k - 1]);
      if (ids[k] != 0) tiles.insert(ids[k] / tile);
      if (ids[k] != 0) highest = std::max(highest, ids[k]);
    }
    const TableFigures found = figures_of(ids, tile);
    require_same(found.runs, defined(is_block, step), what);
    require(found.tiles == static_cast<std::int64_t>(tiles.size()), what + ": tiles");
    require(found.highest == highest, what + ": highest");
    require((found.packed_tiles - 1) * tile < found.runs.blocks &&
                found.runs.blocks <= found.packed_tiles * tile,
            what + ": packed tiles");
    sums.add(found);
    all.insert(all.end(), ids.begin(), ids.end());
    lengths.push_back(static_cast<std::int64_t>(ids.size()));

    // A copy to ids that make the same steps, but for some that are moved elsewhere.
    Ids to = ids;
    for (BlockId& id : to) id = random() % 8 == 0 ? static_cast<BlockId>(random() % 50) : id + 7;
    std::vector<std::int64_t> common(1);
    for (std::size_t k = 1; k < to.size(); ++k) {
      const std::int64_t by = std::int64_t{to[k]} - to[k - 1];
      common.push_back(by == step[k] ? by : 0);
    }
    require_same(copy_figures(span_of(ids), span_of(to)),
                 defined(std::vector<bool>(ids.size(), true), common), what + " copied");
  }
  const TableFigures found = trace_figures(span_of(all), lengths.data(), lengths.size(), tile);
  require_same(found.runs, sums.runs, "trace");
  require(found.tiles == sums.tiles && found.packed_tiles == sums.packed_tiles, "trace: tiles");
  require(found.highest == sums.highest, "trace: highest");
}

// Few numbers that are far apart are sorted, others marked; the border between the two.
void distinct_numbers() {
  for (const BlockId highest : {0, 1, 63, 64, 3071, 3072, 3073, 2147483647}) {
    Ids numbers{highest, 0, highest};
    require(count_distinct(numbers) == (highest == 0 ? 1 : 2), std::to_string(highest));
  }
  Ids none;
  require(count_distinct(none) == 0, "none");
}

void require_refused(const std::function<void()>& call, const std::string& with) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    require(text.find(with) != std::string::npos, "\"" + text + "\" lacks \"" + with + "\"");
    return;
  }
  require(false, "not refused: " + with);
}

void refusals() {
  const Ids good{1, 2, 3};
  const Ids bad{1, 2, -3};
  require_refused([&] { figures_of(bad, 8); }, "not -3: leave out what pads the table (position 2");
  require_refused([&] { figures_of(good, 0); }, "at least one block");
  require_refused([&] { copy_figures(span_of(good), span_of(bad)); }, "not -3");
  require_refused([&] { copy_figures(span_of(bad), span_of(good)); }, "not -3");
  require_refused([&] { copy_figures(span_of(good), {good.data(), 2}); }, "not 2 for 3");
  for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{},
                                                   {2},
                                                   {2, 2},
                                                   {4, -1},
                                                   {3, -1},
                                                   {1, -1, 3},
                                                   {3, 1},
                                                   {INT64_MIN}}) {
    require_refused([&] { trace_figures(span_of(good), lengths.data(), lengths.size(), 8); },
                    "do not make up");
  }
}

}  // namespace

int main() {
  distinct_numbers();
  refusals();
  unsigned seed = 0;
  for (const BlockId most : {1, 9, 100, 5000, 2000000000}) {
    for (const BlockId tile : {1, 2, 3, 8, 2147483647}) random_tables(++seed, most, tile);
  }
  std::cout << "contiguity: " << seed << " times 200 tables\n";
}
