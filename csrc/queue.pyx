# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""The native free-block queue: KV-cache blocks <-> block ids, under vLLM's method names.

The order lives in a C++ list of ids; this file is the border between ids and block objects. What
holds between two calls, besides the rules of the list (free_list.hpp):

    linked(id)                        =>  _blocks[id] is a block whose block_id is id
    _blocks[id] is b                  <=> the payload of id is the address of b
    linked(id)                        =>  the owner of _blocks[id] is self
    len(_blocks) == room of the list, unless the garbage collector is taking the queue apart
    num_free_blocks == size of the list, unless somebody assigned to num_free_blocks

`_blocks` holds the references, the payloads are what the hot path reads: an address beside the links.

The owner of a block is what its own link slot (`prev_free_block`) holds: a queue of this module.
It stays there while the block is in use, so popping and appending write to no block at all; whether
a block is queued, and between which neighbours, is answered from the list when somebody reads
`prev_free_block` or `next_free_block` (see LinkDescriptor).
"""

import operator

cimport cython
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string
from libcpp.vector cimport vector

__all__ = ["DEFAULT_EXTENT_SIZE", "MAX_BLOCK_ID", "MAX_EXTENT_SIZE", "POLICIES", "FreeBlockQueue",
           "FreeListEnd", "can_serve_links", "queues_of", "serve_links", "withdraw_links"]

POLICIES = ("lru", "sorted", "extent")
DEFAULT_EXTENT_SIZE = 8
MAX_EXTENT_SIZE = 4096

# Room is made for each id up to the largest: an absurd id would ask for absurd memory.
MAX_BLOCK_ID = 2**28 - 1
cdef long _MAX_ID = MAX_BLOCK_ID
# Far beyond any pool, and far from where a count would overflow.
cdef Py_ssize_t _MAX_COUNT = 1 << 60


cdef extern from "free_list.hpp" namespace "pyblockpool" nogil:
    ctypedef int32_t BlockId
    cdef BlockId kEnd
    cdef cppclass Chain:
        Chain()
        size_t size
    cdef cppclass FreeList:
        void grow(size_t capacity) except +
        void reserve(size_t capacity) except +
        size_t capacity() const
        size_t size() const
        cpp_bool contains(BlockId) const
        BlockId front() const
        BlockId next(BlockId) const
        BlockId prev(BlockId) const
        BlockId pop_front()
        void* payload(BlockId) const
        void set_payload(BlockId, void*)
        void push_back(BlockId)
        void remove(BlockId)
        void extend(Chain&, BlockId)
        void splice_front(const Chain&)
        void splice_back(const Chain&)
        void dissolve(const Chain&)
        void sort_by_id()
        string check() except +


cdef extern from "extent_list.hpp" namespace "pyblockpool" nogil:
    cdef cppclass ExtentList:
        ExtentList(FreeList&, BlockId extent_size, cpp_bool pack_tails) except +
        BlockId extent_size() const
        cpp_bool pack_tails() const
        size_t size() const
        size_t unhashed() const
        size_t clean() const
        size_t aged() const
        int64_t early_evictions() const
        int64_t shortages() const
        void grow(size_t capacity) except +
        void reserve(size_t count) except +
        void remove(BlockId)
        void add_cached(const Chain&)
        void add_unhashed(const Chain&)
        void forget_hashes()
        BlockId after(BlockId) const
        BlockId before(BlockId) const
        string check() except +


cdef extern from *:
    """
    #include <structmember.h>

    /* Byte offset of the slot behind a member descriptor of a class or one of its bases, -1 for any
       other object. */
    static inline Py_ssize_t pyblockpool_slot_offset(PyObject* descriptor, PyObject* cls) {
      if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type) ||
          !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(cls), PyDescr_TYPE(descriptor))) {
        return -1;
      }
      PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
      return member->type == T_OBJECT_EX && member->flags == 0 ? member->offset : -1;
    }

    /* The value of an int that fits a block id; -1 of any other object. Every id does fit one digit:
       2**28 - 1 is the largest. */
    static inline long pyblockpool_small_int(PyObject* object) {
      if (!PyLong_CheckExact(object)) return -1;
      PyLongObject* number = reinterpret_cast<PyLongObject*>(object);
    #if PY_VERSION_HEX >= 0x030C0000
      return PyUnstable_Long_IsCompact(number)
                 ? static_cast<long>(PyUnstable_Long_CompactValue(number))
                 : -1;
    #else
      const Py_ssize_t digits = Py_SIZE(number);
      return digits == 1 ? static_cast<long>(number->ob_digit[0]) : digits == 0 ? 0 : -1;
    #endif
    }

    /* The `__dict__` of an object; NULL, with TypeError, where a key is no str: to look something up
       beside such a key may run code. */
    static inline PyObject* pyblockpool_plain_attributes(PyObject* object) {
    #if PY_VERSION_HEX >= 0x030C0000
      PyObject* const attributes = PyObject_GenericGetDict(object, nullptr);
    #else
      /* The first look makes the dict, which may start the garbage collector. Code that it runs and
         that looks at the same object makes Python 3.11 keep two dicts of one set of values, and
         free that twice. */
      const int collects = PyGC_Disable();
      PyObject* const attributes = PyObject_GenericGetDict(object, nullptr);
      if (collects) PyGC_Enable();
    #endif
      if (attributes == nullptr) return nullptr;
      PyObject* key;
      for (Py_ssize_t at = 0; PyDict_Next(attributes, &at, &key, nullptr);) {
        if (PyUnicode_CheckExact(key)) continue;
        PyErr_Format(PyExc_TypeError,
                     "a key in the __dict__ of a %.200s is no str but %.200s: take it out",
                     Py_TYPE(object)->tp_name, Py_TYPE(key)->tp_name);
        Py_DECREF(attributes);
        return nullptr;
      }
      return attributes;
    }

    /* A list of ids that is made without allocating anything: what makes a queue does not expect
       that it fails. */
    struct pyblockpool_BareList : pyblockpool::FreeList {
      pyblockpool_BareList() noexcept : FreeList(Bare{}) {}
    };

    static inline void** pyblockpool_list_items(PyObject* list) {
      return reinterpret_cast<void**>(reinterpret_cast<PyListObject*>(list)->ob_item);
    }

    /* Fills a new list of `count` items with the first blocks. */
    static inline void pyblockpool_pop_into(pyblockpool::FreeList& ids, PyObject* list,
                                            Py_ssize_t count) {
      ids.pop_front_n(static_cast<std::size_t>(count), pyblockpool_list_items(list),
                      [](void* block) { Py_INCREF(static_cast<PyObject*>(block)); });
    }

    static inline pyblockpool::BlockId pyblockpool_take_into(pyblockpool::ExtentList& ids,
                                                             PyObject* list, Py_ssize_t count,
                                                             pyblockpool::BlockId after) {
      return ids.take(static_cast<std::size_t>(count), after, pyblockpool_list_items(list),
                      [](void* block) { Py_INCREF(static_cast<PyObject*>(block)); });
    }

    /* The one block that is taken; the reference stays with the list of blocks. */
    static inline PyObject* pyblockpool_take_one(pyblockpool::ExtentList& ids,
                                                 pyblockpool::BlockId after,
                                                 pyblockpool::BlockId* last) {
      void* block = nullptr;
      *last = ids.take(1, after, &block, [](void*) {});
      return static_cast<PyObject*>(block);
    }

    static inline PyObject* pyblockpool_slot(PyObject* block, Py_ssize_t offset) {
      return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + offset);
    }

    /* Chains the unqueued blocks of `owner` in a list of blocks with slots; false where one is
       something else. Runs no Python code. Objects are loaded some blocks ahead, in two steps, as
       the id of a block is an object of its own. */
    static inline bool pyblockpool_chain(pyblockpool::FreeList& ids, pyblockpool::Chain& chain,
                                         PyObject* list, PyObject* owner, PyObject* cls,
                                         Py_ssize_t id_offset, Py_ssize_t prev_offset) {
      constexpr Py_ssize_t kAhead = 8;
      PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(cls);
      PyObject** const items = reinterpret_cast<PyListObject*>(list)->ob_item;
      const Py_ssize_t count = Py_SIZE(list);
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (i + 2 * kAhead < count) {
          char* const later = reinterpret_cast<char*>(items[i + 2 * kAhead]);
          PYBLOCKPOOL_PREFETCH(later);
          PYBLOCKPOOL_PREFETCH(later + prev_offset);
        }
        if (i + kAhead < count && Py_IS_TYPE(items[i + kAhead], type)) {
          PYBLOCKPOOL_PREFETCH(pyblockpool_slot(items[i + kAhead], id_offset));
        }
        PyObject* const block = items[i];
        if (!PyObject_TypeCheck(block, type) || pyblockpool_slot(block, prev_offset) != owner) {
          return false;
        }
        PyObject* const id = pyblockpool_slot(block, id_offset);
        if (id == nullptr || !ids.try_extend(chain, pyblockpool_small_int(id), block)) return false;
      }
      return true;
    }
    """
    cdef cppclass BareList "pyblockpool_BareList"(FreeList):
        BareList()
    void prefetch "PYBLOCKPOOL_PREFETCH"(void*) nogil
    dict plain_attributes "pyblockpool_plain_attributes"(PyObject*)
    long small_int "pyblockpool_small_int"(PyObject*)
    void pop_into "pyblockpool_pop_into"(FreeList&, PyObject* items, Py_ssize_t count)
    BlockId take_into "pyblockpool_take_into"(ExtentList&, PyObject* items, Py_ssize_t count,
                                              BlockId after)
    PyObject* take_one "pyblockpool_take_one"(ExtentList&, BlockId after, BlockId* last)
    bint chain_slot_blocks "pyblockpool_chain"(
        FreeList&, Chain&, PyObject* items, PyObject* owner, PyObject* cls,
        Py_ssize_t id_offset, Py_ssize_t prev_offset)
    Py_ssize_t slot_offset "pyblockpool_slot_offset"(object descriptor, object cls)


cdef extern from "Python.h":
    void Py_INCREF(PyObject*)
    void Py_XDECREF(PyObject*)
    int PyObject_TypeCheck(PyObject*, PyTypeObject*)
    Py_ssize_t PyNumber_AsSsize_t(object, PyObject*) except? -1
    PyObject* PyList_New_raw "PyList_New"(Py_ssize_t) except NULL
    PyObject* PyDict_GetItemWithError(object, object) except? NULL


cdef enum:
    # Marks the failure of a function that returns an id.
    kFailed = -2
    # How many blocks ahead of the front of the queue objects are loaded between two calls.
    LEAD = 8


include "links.pxi"


@cython.final
@cython.auto_pickle(False)
cdef class FreeListEnd:
    """The fake head or tail of a queue: something to link to and to stop at, never a block."""
    cdef FreeBlockQueue queue
    cdef bint is_tail

    block_id = -1

    def __repr__(self):
        return f"<fake {'tail' if self.is_tail else 'head'} of a free-block queue>"

    @property
    def prev_free_block(self):
        """Fake tail: the last block, or the fake head. Fake head: None."""
        if not self.is_tail or self.queue is None or self.queue._tail_is_cut:
            return None
        return self.queue._at(self.queue._prev(kEnd), False)

    @prev_free_block.setter
    def prev_free_block(self, value):
        if self.queue is None:
            self._refuse()
        if self.is_tail and value is None:
            self.queue._tail_is_cut = True
        elif self.is_tail and value is self.queue._at(self.queue._prev(kEnd), False):
            self.queue._tail_is_cut = False
        elif self.is_tail or value is not None:
            self._refuse()

    @property
    def next_free_block(self):
        """Fake head: the first block, or the fake tail. Fake tail: None."""
        if self.is_tail or self.queue is None or self.queue._head_is_cut:
            return None
        return self.queue._at(self.queue._next(kEnd), True)

    @next_free_block.setter
    def next_free_block(self, value):
        if self.queue is None:
            self._refuse()
        if not self.is_tail and value is None:
            self.queue._head_is_cut = True
        elif not self.is_tail and value is self.queue._at(self.queue._next(kEnd), True):
            self.queue._head_is_cut = False
        elif not self.is_tail or value is not None:
            self._refuse()

    cdef _refuse(self):
        raise RuntimeError("the ends of a native queue link to its first and last block: use the "
                           "methods of the queue (append_n, prepend_n, remove) to change them")


@cython.final
@cython.auto_pickle(False)
cdef class BlockIterator:
    """The walk of `iter_blocks_after`; holds a place, not a copy."""
    cdef FreeBlockQueue queue
    cdef object place
    cdef bint finished

    def __iter__(self):
        return self

    def __next__(self):
        if not self.finished and self.queue is not None:
            after = self.queue._after(self.place)
            if after is not None:
                self.place = after
                return after
            self.finished = True
            self.place = None
        raise StopIteration


# The collector breaks the cycle at the list of blocks and at the blocks: a queue that it has already
# cleared could not answer a block that is looked at later.
@cython.no_gc_clear
@cython.auto_pickle(False)
cdef class FreeBlockQueue:
    """Free KV-cache blocks in the order in which they are handed out.

    A drop-in for vLLM's `FreeKVCacheBlockQueue`: the same members, the same order under policy
    `lru`, the same exception types. Where that class silently corrupts itself, this one raises
    and stays as it was. The specification is `pyblockpool.reference.FreeBlockQueue`.

    Args:
        blocks: KV-cache blocks (`block_id`, `prev_free_block`, `next_free_block`) in any order,
            with any ids from 0 to 2**28 - 1, possibly none. A block that is in another native
            queue leaves it.
        policy: `"lru"`, `"sorted"` or `"extent"`.
        size: blocks in an extent, for policy `extent`: a power of two from 1 to 4,096.
        pack_tails: for policy `extent`, whether the last, partly filled extents of tables are
            shared. Keeps more of short tables in the cache, at the price of tiles with two tenants.

    Raises:
        ValueError: no such policy, or no such size.
        TypeError: something that is not a block.
        RuntimeError: two blocks with one id, an id out of range, an end of a list.
    """
    # Under policy `lru` all free ids, in order; under the others the cached ones, longest free
    # first, while the rest is aside (extent_list.hpp). The payloads of all of them.
    cdef BareList _list
    cdef ExtentList* _extents  # NULL under policy `lru`
    cdef str _policy
    # The id beside which the next blocks are taken, kEnd for none.
    cdef BlockId _hint
    # Blocks by id, None where an id was never seen. A list, so that the garbage collector sees the
    # cycle block.pool -> pool -> queue -> block.
    cdef list _blocks
    # Of the one class of blocks that this queue holds; None until it has seen a block.
    cdef BlockLayout _layout
    # Up to where _look_ahead() has come; only a hint, of no consequence if it is stale.
    cdef BlockId _lead
    cdef cpp_bool _head_is_cut
    cdef cpp_bool _tail_is_cut
    cdef Py_ssize_t _num_free_blocks
    cdef readonly FreeListEnd fake_free_list_head
    cdef readonly FreeListEnd fake_free_list_tail

    def __cinit__(self, *args, **kwargs):
        self._list.grow(0)
        self._blocks = []
        self._lead = kEnd
        self._hint = kEnd
        self.fake_free_list_head = FreeListEnd.__new__(FreeListEnd)
        self.fake_free_list_head.queue = self
        self.fake_free_list_tail = FreeListEnd.__new__(FreeListEnd)
        self.fake_free_list_tail.queue = self
        self.fake_free_list_tail.is_tail = True

    def __init__(self, blocks, policy="lru", size=DEFAULT_EXTENT_SIZE, pack_tails=False):
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        policy = POLICIES[POLICIES.index(policy)]  # a plain str, whatever was equal to it
        size = operator.index(size)
        if not 1 <= size <= MAX_EXTENT_SIZE or size & (size - 1):
            raise ValueError(f"size {size} is not a power of two from 1 to {MAX_EXTENT_SIZE}")
        cdef cpp_bool packs = bool(pack_tails)
        blocks = list(blocks)
        if self._policy is not None or self._list.capacity():
            raise RuntimeError("FreeBlockQueue.__init__() called twice on one queue, or late")
        if policy != "lru":
            self._extents = new ExtentList(self._list, 1 if policy == "sorted" else size, packs)
        self._policy = policy
        self._admit(blocks, "FreeBlockQueue", is_cached=False, take_over=True)

    def __dealloc__(self):
        del self._extents
        if self._layout is not None:
            self._layout.queues -= 1

    def __repr__(self):
        return f"<{type(self).__qualname__} policy={self._policy} free={self._size()}>"

    @property
    def num_free_blocks(self):
        """How many blocks are free. May be assigned, to make a pool look full; honoured by
        popleft_n() until it is put back."""
        return self._num_free_blocks

    @num_free_blocks.setter
    def num_free_blocks(self, count):
        # A number too large for any queue becomes the largest there is.
        cdef Py_ssize_t number = PyNumber_AsSsize_t(count, NULL)
        if not -_MAX_COUNT <= number <= _MAX_COUNT:
            raise ValueError(f"num_free_blocks: {count} is not a number of blocks")
        self._num_free_blocks = number

    def popleft(self):
        """Take the first block. ValueError when there is none."""
        if self._size() == 0 or self._head_is_cut:
            if self._num_free_blocks != 0:
                raise AssertionError(f"num_free_blocks ({self._num_free_blocks}) is out of sync "
                                     "with the free list.")
            raise ValueError("No free blocks available")
        if self._is_dying():
            raise RuntimeError("popleft(): this queue is being destroyed")
        cdef PyObject* block
        cdef BlockId last
        if self._extents != NULL:
            self._extents.reserve(1)
            block = take_one(self._extents[0], self._hint, &last)
            self._move_hint(last)
        else:
            block = <PyObject*> self._list.payload(self._list.front())
            self._list.pop_front()
            self._look_ahead(1)
        self._num_free_blocks -= 1
        return <object> block

    def popleft_n(self, n):
        """Take the first `n` blocks, in order. AssertionError when there are fewer."""
        # A number too large for any queue becomes the largest there is.
        return self._pop_n(PyNumber_AsSsize_t(n, NULL))

    cdef object _pop_n(self, Py_ssize_t n):
        if n < 0:
            raise ValueError(f"popleft_n({n}): the number of blocks must not be negative")
        if n == 0:
            return []
        if n > self._num_free_blocks:
            raise AssertionError(f"popleft_n({n}): only {self._num_free_blocks} blocks are free")
        if self._head_is_cut:
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        if <size_t> n > self._size():
            raise RuntimeError(f"popleft_n({n}): num_free_blocks says {self._num_free_blocks} but "
                               f"{self._size()} blocks are queued")
        # Allocations come first: that of the list may start the garbage collector, and with it code
        # that changes this queue.
        if self._extents != NULL:
            self._extents.reserve(n)
        cdef PyObject* taken = PyList_New_raw(n)
        if <size_t> n > self._size() or self._is_dying():
            Py_XDECREF(taken)
            raise RuntimeError(f"popleft_n({n}): the queue changed during the call")
        if self._extents != NULL:
            self._move_hint(take_into(self._extents[0], taken, n, self._hint))
        else:
            pop_into(self._list, taken, n)
            self._look_ahead(n)
        self._num_free_blocks -= n
        result = <object> taken
        Py_XDECREF(taken)
        return result

    def remove(self, block):
        """Take a block out of the middle. RuntimeError when it is not in this queue."""
        cdef BlockId id = self._member_id(<PyObject*> block)
        if id == kEnd:
            raise RuntimeError(
                f"remove() called on an invalid block: {block!r}: it is not in this queue")
        self._take_out(id)
        self._num_free_blocks -= 1

    def append(self, block):
        """Put a block last. RuntimeError, with nothing changed, if it is queued or foreign."""
        if self._tail_is_cut:
            raise RuntimeError("prev_free_block of fake_free_list_tail should always exist")
        cdef BlockId id = self._own_id(<PyObject*> block)
        cdef Chain chain
        if id == kEnd or self._list.contains(id):
            self._admit([block], "append", is_cached=True, take_over=False)
            return
        if self._extents != NULL:
            self._list.extend(chain, id)
            self._extents.add_cached(chain)
        else:
            self._list.push_back(id)
        self._num_free_blocks += 1

    def append_n(self, blocks):
        """Put blocks last, in the given order.

        RuntimeError, with nothing changed, if one is queued, comes twice or is foreign.
        """
        if len(blocks) and self._tail_is_cut:
            raise AssertionError("prev_free_block of fake_free_list_tail should always exist")
        self._insert(blocks, "append_n", is_cached=True)

    def prepend_n(self, blocks):
        """Put blocks first, in the given order.

        RuntimeError, with nothing changed, if one is queued, comes twice or is foreign.
        """
        if len(blocks) and self._head_is_cut:
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        self._insert(blocks, "prepend_n", is_cached=False)

    def get_all_free_blocks(self):
        """The blocks in the order in which they would be handed out."""
        if self._head_is_cut:
            raise RuntimeError("next_free_block of fake_free_list_head should always exist")
        result = []
        cdef BlockId id = self._next(kEnd)
        while id != kEnd:
            result.append(self._blocks[id])
            id = self._next(id)
        return result

    def iter_blocks_after(self, cursor):
        """Lazily, the blocks behind `cursor` (None: all). Nothing if it is not queued here.

        The place is looked up at each step, so the queue may change under the walk; the walk ends
        when the block it stands on has left the queue.
        """
        cdef BlockIterator iterator = BlockIterator.__new__(BlockIterator)
        iterator.queue = self
        iterator.place = self.fake_free_list_head if cursor is None else cursor
        return iterator

    def reorder(self):
        """Canonical order: ascending block ids; under `extent`, whole extents first.
        O(largest id)."""
        if self._extents != NULL:
            self._extents.forget_hashes()
        else:
            self._list.sort_by_id()
        self._lead = kEnd

    def forget_hashes(self):
        """Free blocks have lost their prefix-cache hashes: none is worth keeping any more.
        O(cached blocks)."""
        if self._extents != NULL:
            self._extents.forget_hashes()

    def grow_after(self, block):
        """The next blocks are for a request whose last block is this one; None: for any.

        Under `extent` they are taken beside it if they can. What is handed out becomes the last
        block in turn. RuntimeError, with nothing changed, if the block is not in use here.
        """
        if block is None:
            self._hint = kEnd
            return
        cdef BlockId id = self._own_id(<PyObject*> block)
        if id == kEnd:
            id = self._lent_id(<PyObject*> block)
        if id == kEnd or self._list.contains(id):
            raise RuntimeError(f"grow_after(): {block!r} is not a block of this queue in use")
        self._hint = id

    def check(self):
        """The first broken rule as text, "" if all hold. O(largest id)."""
        cdef string broken = self._list.check()
        if broken.size():
            return broken.decode()
        if <size_t> PyList_GET_SIZE(self._blocks) != self._list.capacity():
            return (f"{len(self._blocks)} blocks are known but there is room for "
                    f"{self._list.capacity()} ids")
        if self._extents != NULL:
            broken = self._extents.check()
            if broken.size():
                return broken.decode()
        cdef BlockId id
        for id in range(<BlockId> self._list.capacity()):
            if not self._list.contains(id):
                continue
            block = self._blocks[id]
            if block is None:
                return f"id {id} is queued but has no block"
            said = getattr(block, "block_id", None)
            if said != id:
                return f"the block at id {id} says that its id is {said!r}"
            if self._member_id(<PyObject*> block) != id:
                return f"block {id} is queued but another queue owns it"
        if <size_t> self._num_free_blocks != self._size():
            return (f"num_free_blocks is {self._num_free_blocks} but "
                    f"{self._size()} are queued")
        if self._head_is_cut or self._tail_is_cut:
            return "an end of the list was cut off from outside"
        return ""

    def stats(self):
        """Figures of the free list; `runs` and `longest_run` in the order of the queue. O(N)."""
        cdef Py_ssize_t runs = 0, longest = 0, length = 0
        cdef BlockId previous = kEnd - 1
        cdef BlockId id = self._next(kEnd)
        while id != kEnd:
            if id == previous + 1:
                length += 1
            else:
                runs += 1
                length = 1
            longest = max(longest, length)
            previous = id
            id = self._next(id)
        stats = {
            "implementation": "native",
            "policy": self._policy,
            "free": self._size(),
            "known": sum(block is not None for block in self._blocks),
            "runs": runs,
            "longest_run": longest,
        }
        if self._extents != NULL:
            stats.update(
                size=self._extents.extent_size(),
                pack_tails=<bint> self._extents.pack_tails(),
                unhashed=self._extents.unhashed(),
                clean=self._extents.clean(),
                aged=self._extents.aged(),
                early_evictions=self._extents.early_evictions(),
                shortages=self._extents.shortages(),
            )
        return stats

    cdef inline size_t _size(self) noexcept:
        return self._list.size() if self._extents == NULL else self._extents.size()

    cdef inline void _put_back(self, const Chain& chain, bint is_cached) noexcept:
        """The blocks of a chain are free from here on."""
        if self._extents != NULL:
            if is_cached:
                self._extents.add_cached(chain)
            else:
                self._extents.add_unhashed(chain)
        elif is_cached:
            self._list.splice_back(chain)
        else:
            self._list.splice_front(chain)
        if not is_cached:
            self._lead = kEnd
        self._num_free_blocks += <Py_ssize_t> chain.size

    cdef inline void _take_out(self, BlockId id) noexcept:
        if self._extents != NULL:
            self._extents.remove(id)
        else:
            self._list.remove(id)

    cdef inline void _move_hint(self, BlockId last) noexcept:
        if self._hint != kEnd:
            self._hint = last

    cdef inline BlockId _next(self, BlockId id) noexcept:
        """The id behind a queued one, or the first one behind kEnd; kEnd at the end."""
        return self._list.next(id) if self._extents == NULL else self._extents.after(id)

    cdef inline BlockId _prev(self, BlockId id) noexcept:
        """The id before a queued one, or the last one before kEnd; kEnd at the front."""
        return self._list.prev(id) if self._extents == NULL else self._extents.before(id)

    cdef inline BlockId _own_id(self, PyObject* block) except? kFailed:
        """Id of a block that this queue owns, queued or not; kEnd for any other object."""
        cdef BlockLayout layout = self._layout
        if layout is None or not PyObject_TypeCheck(block, <PyTypeObject*> layout.cls):
            return kEnd
        if layout.id_offset >= 0:
            return self._own_slot_id(block)
        return self._own_dict_id(block)

    cdef inline BlockId _own_slot_id(self, PyObject* block) noexcept:
        """_own_id() of a block with slots: runs no Python code and cannot fail."""
        cdef BlockLayout layout = self._layout
        if (<PyObject**> (<char*> block + layout.prev_offset))[0] != <PyObject*> self:
            return kEnd
        return self._known_id(block, (<PyObject**> (<char*> block + layout.id_offset))[0])

    cdef BlockId _own_dict_id(self, PyObject* block) except? kFailed:
        """_own_id() of a block without slots: fails where its attributes cannot be read."""
        attributes = plain_attributes(block)
        if PyDict_GetItemWithError(attributes, "prev_free_block") != <PyObject*> self:
            return kEnd
        return self._known_id(block, PyDict_GetItemWithError(attributes, "block_id"))

    cdef BlockId _lent_id(self, PyObject* block) except? kFailed:
        """Id of a block of ours that another queue has had meanwhile, and given back; else kEnd."""
        cdef BlockLayout layout = self._layout
        cdef FreeBlockQueue owner
        if layout is None or not PyObject_TypeCheck(block, <PyTypeObject*> layout.cls):
            return kEnd
        owner = layout.owner(block)
        if owner is not None:
            if owner._member_id(block) != kEnd:
                return kEnd
        elif layout.raw(block, False) is not None:
            return kEnd
        block_id = layout.stored(block, layout.id_offset, "block_id")
        return self._known_id(block, <PyObject*> block_id)

    cdef inline BlockId _known_id(self, PyObject* block, PyObject* boxed) noexcept:
        """The number in `boxed` if the block is known under it, else kEnd."""
        cdef long id = small_int(boxed) if boxed != NULL else -1
        if id < 0 or id >= PyList_GET_SIZE(self._blocks):
            return kEnd
        return <BlockId> id if self._list.payload(<BlockId> id) == <void*> block else kEnd

    cdef inline void _look_ahead(self, Py_ssize_t taken) noexcept:
        """Begin to load the blocks that the calls after one that took `taken` will want."""
        cdef BlockId id = self._lead
        if id < 0 or not self._list.contains(id):
            id = kEnd
            taken = LEAD
        for _ in range(min(taken, <Py_ssize_t> LEAD)):
            id = self._list.next(id)
            if id == kEnd:
                break
            self._load_links(<PyObject*> self._list.payload(id))
        self._lead = id

    cdef inline void _load_links(self, PyObject* block) noexcept:
        """Begin to load what _own_id() reads of a block: its head and its link slot."""
        prefetch(block)
        prefetch(<char*> block + self._layout.prev_offset)

    cdef inline BlockId _member_id(self, PyObject* block) except? kFailed:
        """Id of a block that is queued here, else kEnd."""
        cdef BlockId id = self._own_id(block)
        return id if id == kEnd or self._list.contains(id) else kEnd

    cdef bint _link(self, list blocks, Chain* chain) except -1:
        """Chain unqueued blocks of ours; False, with nothing changed, where one is not."""
        if self._layout is None:
            return PyList_GET_SIZE(blocks) == 0
        if self._layout.id_offset < 0:
            return self._link_dict_blocks(blocks, chain)
        if chain_slot_blocks(self._list, chain[0], <PyObject*> blocks, <PyObject*> self,
                             <PyObject*> self._layout.cls, self._layout.id_offset,
                             self._layout.prev_offset):
            return True
        self._list.dissolve(chain[0])
        chain[0] = Chain()
        return False

    cdef bint _link_dict_blocks(self, list blocks, Chain* chain) except -1:
        cdef vector[BlockId] ids
        cdef BlockId id
        for block in blocks:
            id = self._own_id(<PyObject*> block)
            if id == kEnd or self._list.contains(id):
                return False
            ids.push_back(id)
        for id in ids:
            if self._list.contains(id):
                self._list.dissolve(chain[0])
                chain[0] = Chain()
                return False
            self._list.extend(chain[0], id)
        return True

    cdef int _insert(self, blocks, str verb, bint is_cached) except -1:
        """Put blocks of any kind back, or raise with nothing changed."""
        cdef list batch = <list> blocks if type(blocks) is list else list(blocks)
        cdef Chain chain
        if self._link(batch, &chain):
            self._put_back(chain, is_cached)
        else:
            self._admit(batch, verb, is_cached, take_over=False)
        return 0

    cdef int _admit(self, list blocks, str verb, bint is_cached, bint take_over) except -1:
        """The same, never seen ones included. With `take_over`, blocks that are queued in another
        native queue leave it.

        Code of others may run as long as anything is allocated or asked for: of a metaclass, of a
        finalizer, in another thread. So all of that comes first; then nothing may have changed
        meanwhile; then the blocks are ours. What is overwritten then is held to the end.
        """
        cdef dict batch = {}
        cdef list admitted = []
        cdef list overwritten = []
        cdef vector[BlockId] ids
        cdef BlockLayout layout = self._layout
        cdef FreeBlockQueue owner
        cdef Chain chain
        cdef BlockId id, largest = kEnd
        cdef Py_ssize_t i
        cls = None
        if self._is_dying():
            raise RuntimeError(f"{verb}(): this queue is being destroyed")
        for block in blocks:
            if type(block) is not cls:
                cls = type(block)  # once: asking for the layout may run code of its metaclass
                if layout is None:
                    layout = _prepared(block, verb)
                elif layout is not _prepared(block, verb):
                    raise TypeError(f"{verb}(): this queue holds blocks of the class "
                                    f"{layout.cls.__qualname__}, not {type(block).__qualname__}")
            block_id = self._checked_id(block, layout, verb)
            id = <BlockId> small_int(<PyObject*> block_id)
            known = self._blocks[id] if id < PyList_GET_SIZE(self._blocks) else None
            # Not setdefault(): Python 3.13.0 crashes in it where memory is short.
            earlier = batch.get(block_id)
            if (known is not None and known is not block) or (
                    earlier is not None and earlier is not block):
                raise RuntimeError(f"{verb}(): block {block_id} is foreign: this queue has "
                                   f"another block with id {block_id}")
            if earlier is not None:
                raise RuntimeError(f"{verb}(): block {block_id} comes twice in one call")
            self._refuse_linked(block, id, layout, verb, take_over)
            batch[block_id] = block
            ids.push_back(id)
            admitted.append(block)
            self._note_link(block, False, layout, overwritten)
            self._note_link(block, True, layout, overwritten)
            largest = max(largest, id)
        if largest == kEnd:
            return 0
        self._make_room(<Py_ssize_t> largest + 1)
        if not layout.served or (self._layout is not None and self._layout is not layout):
            raise RuntimeError(f"{verb}(): the class of the blocks was changed during the call")
        for i in range(PyList_GET_SIZE(admitted)):
            if not self._stands(admitted[i], layout, ids[i], overwritten[2 * i],
                                overwritten[2 * i + 1], take_over):
                raise RuntimeError(f"{verb}(): block {ids[i]} was changed during the call")
        for i in range(PyList_GET_SIZE(admitted)):
            block = admitted[i]
            id = ids[i]
            owner = layout.owner(<PyObject*> block)
            if owner is not None and owner._member_id(<PyObject*> block) != kEnd:
                owner._take_out(id)
                owner._num_free_blocks -= 1
            layout.set_raw(<PyObject*> block, False, self)
            layout.set_raw(<PyObject*> block, True, None)
            self._blocks[id] = block
            self._list.set_payload(id, <PyObject*> block)
            self._list.extend(chain, id)
        if self._layout is None:
            self._layout = layout
            layout.queues += 1
        self._put_back(chain, is_cached)
        return 0

    cdef inline int _note_link(self, block, bint is_next, BlockLayout layout,
                               list overwritten) except -1:
        """Keep what a link of a block holds."""
        held = layout.raw(<PyObject*> block, is_next)
        if held is None:
            # So that something is stored, also where that is the default of the class.
            layout.set_raw(<PyObject*> block, is_next, None)
        overwritten.append(held)
        return 0

    cdef bint _stands(self, block, BlockLayout layout, BlockId id, prev, next,
                      bint take_over) except -1:
        """Whether a block is still what it was when it was looked at."""
        cdef PyObject* raw_block = <PyObject*> block
        cdef FreeBlockQueue owner
        block_id = layout.stored(raw_block, layout.id_offset, "block_id")
        if small_int(<PyObject*> block_id) != id:
            return False
        if self._blocks[id] is not None and self._blocks[id] is not block:
            return False
        if layout.raw(raw_block, False) is not prev or layout.raw(raw_block, True) is not next:
            return False
        owner = layout.owner(raw_block)
        if owner is not self and self._list.contains(id):
            return False
        return take_over or owner is None or owner._member_id(raw_block) == kEnd

    cdef int _refuse_linked(self, block, BlockId id, BlockLayout layout, str verb,
                            bint take_over) except -1:
        """Raise if a block is queued, here or elsewhere, and may not be taken over."""
        cdef FreeBlockQueue owner = layout.owner(<PyObject*> block)
        if (owner is not self and id < PyList_GET_SIZE(self._blocks)
                and self._list.contains(id)):
            # The list counts, not what the block says of itself.
            raise RuntimeError(f"{verb}(): block {id} is already queued, and somebody has "
                               "overwritten its links")
        if owner is None:
            if not take_over and (layout.holds_link(<PyObject*> block, False)
                                  or layout.holds_link(<PyObject*> block, True)):
                raise RuntimeError(
                    f"{verb}(): block {block.block_id} is queued in another queue")
        elif owner._own_id(<PyObject*> block) == kEnd:
            # A queue knows its blocks under their ids.
            raise RuntimeError(f"{verb}(): block {block.block_id} had another id when it was "
                               "queued first, or is a copy of a block")
        elif not take_over and owner._member_id(<PyObject*> block) != kEnd:
            raise RuntimeError(f"{verb}(): block {block.block_id} is "
                               + ("already queued" if owner is self
                                  else "queued in another queue"))
        return 0

    cdef int _make_room(self, Py_ssize_t capacity) except -1:
        """Room for the ids below `capacity`, or MemoryError with nothing changed."""
        cdef Py_ssize_t before = PyList_GET_SIZE(self._blocks)
        if capacity <= before:
            return 0
        # Made first: it may start the garbage collector, and with it code that makes room, too.
        room = [None] * (capacity - before)
        if PyList_GET_SIZE(self._blocks) != before:
            return self._make_room(capacity)
        # The list has room for as many ids as there are blocks: it grows last, and cannot fail.
        if self._extents != NULL:
            self._extents.grow(capacity)
        self._list.reserve(capacity)
        self._blocks.extend(room)
        self._list.grow(capacity)
        return 0

    cdef object _checked_id(self, block, BlockLayout layout, str verb):
        block_id = layout.stored(<PyObject*> block, layout.id_offset, "block_id")
        if block_id is _MISSING:
            block_id = None
        if 0 <= small_int(<PyObject*> block_id) <= _MAX_ID:
            return block_id
        if type(block_id) is not int:
            raise TypeError(f"{verb}(): block id {block_id!r} is not an int")
        raise RuntimeError(f"{verb}(): block id {block_id} is not in 0...{MAX_BLOCK_ID}")

    cdef object _neighbour(self, block, bint is_next):
        """The live link of a block of this queue: a block, an end, or None when not queued."""
        cdef BlockId id = self._member_id(<PyObject*> block)
        if id == kEnd:
            return None
        return self._at(self._next(id) if is_next else self._prev(id), is_next)

    cdef object _at(self, BlockId id, bint is_next):
        if id == kEnd:
            return self.fake_free_list_tail if is_next else self.fake_free_list_head
        return self._blocks[id]

    cdef object _after(self, place):
        """The block behind a queued block or the fake head, None if there is none."""
        cdef BlockId id
        if place is self.fake_free_list_head:
            id = kEnd if self._head_is_cut else self._next(kEnd)
        else:
            id = self._member_id(<PyObject*> place)
            if id == kEnd:
                return None
            id = self._next(id)
        return None if id == kEnd else self._blocks[id]

    cdef inline bint _is_dying(self) noexcept:
        """Whether the garbage collector has emptied the list of blocks, as it takes us apart."""
        return <size_t> PyList_GET_SIZE(self._blocks) != self._list.capacity()
