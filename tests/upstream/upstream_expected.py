"""The tests of vLLM 0.32 that cannot pass under a placement policy, each with the reason.

They hold LRU order itself to be right: by block ids, or by what is left of a cache in a pool of a
few extents. The comparison holds the list against what fails: a test that is listed and passes, or
fails by anything but an assertion, makes it fail. All pass in extents of one block but those that
are listed under `native:sorted`, too.
"""

CACHING = "tests/v1/core/test_prefix_caching.py"
HISPARSE = "tests/v1/kv_connector/unit/test_hisparse_connector.py"
OFFLOADING = "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py"

UNHASHED = "asserts that blocks without a hash are reused last freed first; here the lowest first"
RESET_IDS = (
    "asserts which ids follow on a reset of the prefix cache, which keeps LRU order in vLLM; here "
    "they begin with the lowest"
)
OWN_EXTENT = (
    "asserts the ids of tables, which in vLLM begin where the one before ended; here each begins "
    "in an extent of its own"
)

OUTLIVES = (
    "asserts that cached blocks outlive another allocation in a pool of 32 blocks; here these are "
    "four extents, and cached blocks leave with their neighbours"
)

BY_DESIGN: dict[str, dict[str, str]] = {
    "native:sorted": {
        f"{CACHING}::test_prefill[sha256]": UNHASHED,
        f"{CACHING}::test_prefill[sha256_cbor]": UNHASHED,
        f"{CACHING}::test_prefill_plp": UNHASHED,
        f"{OFFLOADING}::test_request_finished_mixed_full_attn_and_sliding_window": RESET_IDS,
    },
    "native:extent": {
        f"{CACHING}::test_device_eviction_keeps_host_prefix": (
            "asserts that the first tables of two pools have the same ids; here that of the device "
            "begins in an extent of its own, and the host's pool has no extents"
        ),
        f"{CACHING}::test_different_block_size": OWN_EXTENT,
        f"{CACHING}::test_evict": OWN_EXTENT,
        f"{CACHING}::test_hisparse_host_prefix_can_be_completed_by_indexer_offload": OUTLIVES,
        f"{CACHING}::test_hisparse_prefix_hit_adopts_gpu_shadow_pages": OUTLIVES,
        **{
            f"{CACHING}::test_hisparse_prefix_hit_under_pressure_adopts_surviving_copies[{case}]": (
                "asserts which cached blocks outlive an allocation of all blocks but 7 or 10; here "
                "whole extents are handed out, cached or not, before blocks kept for growth"
            )
            for case in ("7-adopted_pages0", "10-adopted_pages1")
        },
        f"{CACHING}::test_hisparse_terminal_prefix_waits_for_all_workers_and_preserves_identity": (
            OUTLIVES
        ),
        f"{CACHING}::test_hybrid_local_kv_retention_interval_survives_recycling": (
            "asserts that what one request left in the cache outlives another one in 800 blocks; "
            "here these are 25 extents, as the smallest block has 4 tokens, and cached blocks "
            "leave with their neighbours; with 1,000 blocks it passes"
        ),
        f"{CACHING}::test_prefill[sha256]": UNHASHED,
        f"{CACHING}::test_prefill[sha256_cbor]": UNHASHED,
        f"{CACHING}::test_prefill_hybrid_model": OWN_EXTENT,
        f"{CACHING}::test_prefill_hybrid_model_eagle": OWN_EXTENT,
        f"{CACHING}::test_prefill_plp": UNHASHED,
        f"{CACHING}::test_swa_free_split_keeps_cached_tail_ahead_of_scratch": (
            "asserts that all blocks without a hash are reused before any cached one; here those "
            "that lie in one extent with a cached one leave with it"
        ),
        f"{HISPARSE}::test_scheduled_prefix_hit_publishes_adopted_copies": OUTLIVES,
        f"{OFFLOADING}::test_request_finished_mixed_full_attn_and_sliding_window": RESET_IDS,
    },
}
