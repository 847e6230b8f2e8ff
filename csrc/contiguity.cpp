// NumPy arrays -> the functions of contiguity.hpp -> tuples of numbers, for
// pyblockpool/contiguity.py.
#include "contiguity.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <tuple>

namespace py = pybind11;

namespace {

using pyblockpool::BlockId;
using pyblockpool::IdSpan;
using pyblockpool::RunFigures;
using pyblockpool::TableFigures;

// Nothing is converted here (py::arg().noconvert() below): pyblockpool/contiguity.py does that, and
// says what it cannot convert.
using Ids = py::array_t<BlockId, py::array::c_style>;
using Lengths = py::array_t<std::int64_t, py::array::c_style>;

IdSpan span_of(const Ids& ids) {
  if (ids.ndim() != 1) throw std::invalid_argument("block ids come in one dimension");
  return {ids.data(), static_cast<std::size_t>(ids.size())};
}

// Lets other threads of Python run while many ids are looked at; for a few it would take longer
// than they do.
class Meanwhile {
 public:
  explicit Meanwhile(std::size_t ids) {
    if (ids >= kMany) released_.emplace();
  }

 private:
  static constexpr std::size_t kMany = 4096;
  std::optional<py::gil_scoped_release> released_;
};

using RunTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using TableTuple =
    decltype(std::tuple_cat(RunTuple(), std::tuple<std::int64_t, std::int64_t, std::int64_t>()));

RunTuple numbers_of(const RunFigures& figures) {
  return {figures.blocks, figures.neighbours, figures.runs, figures.runs_either,
          figures.longest_run};
}

TableTuple numbers_of(const TableFigures& figures) {
  return std::tuple_cat(
      numbers_of(figures.runs),
      std::make_tuple(figures.tiles, figures.packed_tiles, std::int64_t{figures.highest}));
}

TableTuple table_figures(const Ids& ids, BlockId tile) {
  const IdSpan span = span_of(ids);
  const Meanwhile meanwhile(span.size);
  std::vector<BlockId> scratch;
  return numbers_of(pyblockpool::table_figures(span, tile, scratch));
}

TableTuple trace_figures(const Ids& ids, const Lengths& lengths, BlockId tile) {
  const IdSpan span = span_of(ids);
  if (lengths.ndim() != 1) throw std::invalid_argument("lengths come in one dimension");
  const std::int64_t* first = lengths.data();
  const auto tables = static_cast<std::size_t>(lengths.size());
  const Meanwhile meanwhile(span.size);
  return numbers_of(pyblockpool::trace_figures(span, first, tables, tile));
}

RunTuple copy_figures(const Ids& source, const Ids& destination) {
  const IdSpan from = span_of(source);
  const IdSpan to = span_of(destination);
  const Meanwhile meanwhile(from.size);
  return numbers_of(pyblockpool::copy_figures(from, to));
}

}  // namespace

PYBIND11_MODULE(_contiguity, module) {
  module.doc() = "Figures of contiguity, for pyblockpool.contiguity.";
  module.def("table_figures", &table_figures, py::arg("ids").noconvert(),
             py::arg("tile").noconvert(),
             "blocks, neighbours, runs, runs_either, longest_run, tiles, packed_tiles, highest id");
  module.def("trace_figures", &trace_figures, py::arg("ids").noconvert(),
             py::arg("lengths").noconvert(), py::arg("tile").noconvert(),
             "The same over tables that lie one behind the other.");
  module.def("copy_figures", &copy_figures, py::arg("source").noconvert(),
             py::arg("destination").noconvert(),
             "blocks, neighbours, runs, runs_either, longest_run");
}
