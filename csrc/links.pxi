# How classes of blocks keep their ids and links, and how the links are served from native queues.
# Part of queue.pyx.

cdef object _MISSING = object()
# What a metaclass says of its classes may be anything, and saying it may run code: slots are read by
# offset, so the true bases count.
cdef object _true_bases = type.__dict__["__mro__"].__get__
cdef object _true_vars = type.__dict__["__dict__"].__get__


@cython.final
@cython.auto_pickle(False)
cdef class BlockLayout:
    """Where the blocks of one class keep `block_id` and their links.

    Blocks of vLLM 0.18 and later have slots, at fixed offsets; older ones keep all three in
    `__dict__`, in which case the offsets are -1. Reading and writing them runs no code of anybody
    else, but for one thing: what is overwritten may have a destructor.
    """
    cdef object cls
    cdef object attributes  # of the class itself, live
    cdef Py_ssize_t id_offset
    cdef Py_ssize_t prev_offset
    cdef Py_ssize_t next_offset
    cdef object original_prev
    cdef object original_next
    # Native queues alive that have blocks of this class.
    cdef Py_ssize_t queues
    # Whether the class has our descriptors.
    cdef bint served

    cdef object stored(self, PyObject* block, Py_ssize_t offset, str name):
        """What a block holds at a slot or under a name; _MISSING if nothing. TypeError where
        something is no name of an attribute."""
        cdef PyObject* held
        if offset >= 0:
            held = (<PyObject**> (<char*> block + offset))[0]
        else:
            attributes = plain_attributes(block)
            held = PyDict_GetItemWithError(attributes, name)
        return _MISSING if held == NULL else <object> held

    cdef object raw(self, PyObject* block, bint is_next):
        """The stored link; None where nothing was stored yet in a `__dict__`, _MISSING in a slot."""
        if self.prev_offset < 0:
            held = self.stored(block, -1, "next_free_block" if is_next else "prev_free_block")
            return None if held is _MISSING else held
        return self.stored(block, self.next_offset if is_next else self.prev_offset, "")

    cdef bint holds_link(self, PyObject* block, bint is_next) except -1:
        held = self.raw(block, is_next)
        return held is not None and held is not _MISSING

    cdef int set_raw(self, PyObject* block, bint is_next, object value) except -1:
        """Cannot fail where something is stored."""
        cdef Py_ssize_t offset = self.next_offset if is_next else self.prev_offset
        cdef PyObject* old
        if offset >= 0:
            old = (<PyObject**> (<char*> block + offset))[0]
            Py_INCREF(<PyObject*> value)
            (<PyObject**> (<char*> block + offset))[0] = <PyObject*> value
            Py_XDECREF(old)
        else:
            (<dict> plain_attributes(block))[
                "next_free_block" if is_next else "prev_free_block"] = value
        return 0

    cdef int put_original_back(self, str name, object original) except -1:
        """Allocates nothing where the class has an attribute of its own."""
        if type(self.attributes.get(name)) is LinkDescriptor:
            if original is _MISSING:
                delattr(self.cls, name)
            else:
                setattr(self.cls, name, original)
        return 0

    cdef int put_originals_back(self) except -1:
        self.put_original_back("prev_free_block", self.original_prev)
        self.put_original_back("next_free_block", self.original_next)
        return 0

    cdef FreeBlockQueue owner(self, PyObject* block):
        """The native queue that admitted the block last, or None."""
        held = self.raw(block, False)
        return <FreeBlockQueue> held if isinstance(held, FreeBlockQueue) else None


# Layouts by the address of the class that defines the links, which they keep alive. Not by the
# class: its metaclass may define equality.
cdef dict _layouts = {}


@cython.final
@cython.auto_pickle(False)
cdef class LinkDescriptor:
    """`prev_free_block` or `next_free_block` of a class of blocks, served live.

    For a block that a native queue owns the neighbours are read off the list of that queue, and
    None when the block is not queued. Any other block behaves as with the descriptor that this one
    stands for, so a queue in Python beside a native one still works.
    """
    cdef BlockLayout layout
    cdef bint is_next

    def __repr__(self):
        return f"<native link {'next' if self.is_next else 'prev'}_free_block>"

    def __get__(self, block, owner_class):
        if block is None:
            return self
        self._refuse_stranger(block)
        cdef FreeBlockQueue queue = self.layout.owner(<PyObject*> block)
        if queue is not None:
            return queue._neighbour(block, self.is_next)
        held = self.layout.raw(<PyObject*> block, self.is_next)
        if held is _MISSING:
            raise AttributeError("next_free_block" if self.is_next else "prev_free_block")
        return held

    def __set__(self, block, value):
        self._refuse_stranger(block)
        cdef FreeBlockQueue queue = self.layout.owner(<PyObject*> block)
        if queue is not None:
            served = queue._neighbour(block, self.is_next)
            if value is served and queue._own_id(<PyObject*> block) != kEnd:
                return
            if served is not None:
                raise RuntimeError(
                    f"the links of block {block.block_id} are those of the native queue it is in: "
                    "use the methods of the queue (remove, append, popleft) to change them")
            # A queue in Python takes the block over, or a copy of a block is made a block of its own.
            self.layout.set_raw(<PyObject*> block, False, None)
        self.layout.set_raw(<PyObject*> block, self.is_next, value)

    cdef int _refuse_stranger(self, block) except -1:
        # Not isinstance(), which an object may answer as it likes: the slots are read by offset.
        if self.layout is None or not PyObject_TypeCheck(<PyObject*> block,
                                                         <PyTypeObject*> self.layout.cls):
            raise TypeError(f"{self!r} does not apply to a {type(block).__name__!r} object")
        return 0


cdef BlockLayout _new_layout(block_class):
    """How a class of blocks keeps its links, None if in no way that a queue could serve."""
    home = block_class
    for base in _true_bases(block_class):
        if "prev_free_block" in _true_vars(base):
            home = base
            break
    cdef BlockLayout layout = BlockLayout.__new__(BlockLayout)
    layout.cls = home
    layout.attributes = _true_vars(home)
    layout.original_prev = layout.attributes.get("prev_free_block", _MISSING)
    layout.original_next = layout.attributes.get("next_free_block", _MISSING)
    layout.id_offset = slot_offset(getattr(home, "block_id", None), home)
    layout.prev_offset = slot_offset(layout.original_prev, home)
    layout.next_offset = slot_offset(layout.original_next, home)
    if layout.prev_offset < 0 or layout.next_offset < 0 or layout.id_offset < 0:
        # No slots, so all three are in __dict__, and None or nothing is the default of the links.
        if not home.__dictoffset__ or hasattr(getattr(home, "block_id", None), "__get__") or not all(
                link is None or link is _MISSING
                for link in (layout.original_prev, layout.original_next)):
            return None
        layout.id_offset = layout.prev_offset = layout.next_offset = -1
    elif len({layout.id_offset, layout.prev_offset, layout.next_offset}) < 3:
        return None
    return layout


def can_serve_links(block_class) -> bool:
    """Whether `serve_links` would do; changes nothing."""
    # In this order: the first look may run code, which may serve the class.
    return isinstance(block_class, type) and (
        _new_layout(block_class) is not None or _layout_of(block_class) is not None)


def serve_links(block_class) -> None:
    """Serve `prev_free_block` and `next_free_block` of a class of blocks from native queues.

    Replaces the two attributes of the class (once; further calls change nothing). A queue does
    this by itself for the first block of a class that it sees.

    Raises:
        TypeError: the class has no such links, they are properties of somebody else, or it cannot
            be changed.
    """
    _served(block_class)


cdef BlockLayout _served(block_class):
    """The layout of a class, whose links are served from now on; else what serve_links() raises."""
    cdef BlockLayout layout = _layout_of(block_class)
    if layout is not None:
        return layout
    if isinstance(block_class, type):
        layout = _new_layout(block_class)
    if layout is not None:
        # What it takes to undo it is there before it is done.
        prev, next = _descriptor(layout, False), _descriptor(layout, True)
    # So far code of others may have run, and it may have served the class; from here on none does,
    # but that of a metaclass.
    other = _layout_of(block_class)
    if other is not None:
        return other
    if layout is None:
        raise TypeError(f"{block_class!r} has no links that a queue could serve: it needs "
                        "prev_free_block and next_free_block as slots, or as plain attributes "
                        "that default to None")
    address = <size_t> <PyObject*> layout.cls
    _layouts[address] = layout
    try:
        setattr(layout.cls, "prev_free_block", prev)
        setattr(layout.cls, "next_free_block", next)
    except BaseException:
        if address in _layouts:
            del _layouts[address]
        layout.put_originals_back()
        raise
    layout.served = True
    return layout


cdef LinkDescriptor _descriptor(BlockLayout layout, bint is_next):
    cdef LinkDescriptor descriptor = LinkDescriptor.__new__(LinkDescriptor)
    descriptor.layout = layout
    descriptor.is_next = is_next
    return descriptor


def queues_of(block_class) -> int:
    """How many native queues that are alive have blocks of a class."""
    cdef BlockLayout layout = _layout_of(block_class)
    return 0 if layout is None else layout.queues


def withdraw_links(block_class) -> None:
    """Undo `serve_links`.

    Raises:
        RuntimeError: native queues with blocks of this class are alive; nothing is changed.
    """
    cdef BlockLayout layout = _layout_of(block_class)
    if layout is None:
        return
    if layout.queues:
        raise RuntimeError(
            f"{layout.queues} native queues still have blocks of {layout.cls.__qualname__}: "
            "drop them (and their pools) first")
    address = <size_t> <PyObject*> layout.cls
    layout.put_originals_back()
    layout.served = False
    del _layouts[address]


cdef BlockLayout _layout_of(block_class):
    """The layout of a class whose links are served when this returns, else None."""
    cdef tuple bases
    cdef list homes
    cdef Py_ssize_t i
    if isinstance(block_class, type):
        bases = _true_bases(block_class)
        # To look at what a class has may start the garbage collector. To look at the layouts does
        # not, and so comes last.
        homes = ["prev_free_block" in _true_vars(base) for base in bases]
        for i in range(PyList_GET_SIZE(homes)):
            base = bases[i]
            layout = _layouts.get(<size_t> <PyObject*> base)
            if layout is not None or homes[i]:
                return layout
    return None


cdef BlockLayout _prepared(block, str verb):
    """The layout of the class of a block, whose links are served from now on; TypeError if it is
    not the class of a block."""
    if type(block) is FreeListEnd:
        raise RuntimeError(f"{verb}(): an end of a free list (block id -1) is not a block")
    cdef BlockLayout layout = _layout_of(type(block))
    if layout is None:
        if not can_serve_links(type(block)) or not all(
                hasattr(block, name)
                for name in ("block_id", "prev_free_block", "next_free_block")):
            raise TypeError(
                f"{verb}(): {type(block).__name__} is not a KV-cache block: it needs block_id, "
                "prev_free_block and next_free_block, as slots or as plain attributes")
        layout = _served(type(block))
    return layout
