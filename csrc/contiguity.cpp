// NumPy arrays -> the functions of contiguity.hpp -> tuples of numbers, for
// pyblockpool/contiguity.py.
#include "contiguity.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <new>
#include <optional>

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

// As Py_BuildValue takes it.
constexpr long long number(std::int64_t figure) { return figure; }

// What is not there for lack of memory. The casters of pybind11 would call that a TypeError.
py::tuple checked(PyObject* tuple) {
  if (tuple == nullptr) {
    PyErr_Clear();
    throw std::bad_alloc();
  }
  return py::reinterpret_steal<py::tuple>(tuple);
}

py::tuple numbers_of(const RunFigures& runs) {
  return checked(Py_BuildValue("(LLLLL)", number(runs.blocks), number(runs.neighbours),
                               number(runs.runs), number(runs.runs_either),
                               number(runs.longest_run)));
}

py::tuple numbers_of(const TableFigures& figures) {
  const RunFigures& runs = figures.runs;
  return checked(Py_BuildValue("(LLLLLLLL)", number(runs.blocks), number(runs.neighbours),
                               number(runs.runs), number(runs.runs_either),
                               number(runs.longest_run), number(figures.tiles),
                               number(figures.packed_tiles), number(figures.highest)));
}

TableFigures figures_of_table(const IdSpan& ids, BlockId tile) {
  const Meanwhile meanwhile(ids.size);
  std::vector<BlockId> scratch;
  return pyblockpool::table_figures(ids, tile, scratch);
}

py::tuple table_figures(const Ids& ids, BlockId tile) {
  return numbers_of(figures_of_table(span_of(ids), tile));
}

TableFigures figures_of_trace(const IdSpan& ids, const Lengths& lengths, BlockId tile) {
  if (lengths.ndim() != 1) throw std::invalid_argument("lengths come in one dimension");
  const std::int64_t* first = lengths.data();
  const auto tables = static_cast<std::size_t>(lengths.size());
  const Meanwhile meanwhile(ids.size);
  return pyblockpool::trace_figures(ids, first, tables, tile);
}

py::tuple trace_figures(const Ids& ids, const Lengths& lengths, BlockId tile) {
  return numbers_of(figures_of_trace(span_of(ids), lengths, tile));
}

RunFigures figures_of_copy(const IdSpan& from, const IdSpan& to) {
  const Meanwhile meanwhile(from.size);
  return pyblockpool::copy_figures(from, to);
}

py::tuple copy_figures(const Ids& source, const Ids& destination) {
  return numbers_of(figures_of_copy(span_of(source), span_of(destination)));
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
