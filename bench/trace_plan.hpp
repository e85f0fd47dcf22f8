// From recorded requests to slices: which pages of KV cache a decode engine fetches, and where they lie.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

#include <kvferry/runtime/slice.hpp>

#include "bench/kv_model.hpp"
#include "bench/random.hpp"
#include "bench/trace.hpp"

namespace kvferry::bench {

/// A KV memory: for every plane (layer, and K or V) the blocks of all pages, one after the other.
struct KvPool {
  KvModel model;
  std::uint32_t pages = 0;

  /// As many whole pages as fit into `bytes`.
  static KvPool of(const KvModel& model, std::uint64_t bytes) noexcept {
    return {model, static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes / model.page_bytes(), UINT32_MAX))};
  }
  std::uint64_t bytes() const noexcept { return pages * model.page_bytes(); }
  std::uint64_t blocks() const noexcept { return std::uint64_t{pages} * model.planes(); }
  std::uint64_t block_index(std::uint32_t plane, std::uint32_t page) const noexcept {
    return std::uint64_t{plane} * pages + page;
  }
  std::uint64_t offset(std::uint32_t plane, std::uint32_t page) const noexcept {
    return block_index(plane, page) * model.block_bytes();
  }
};

/// What the decode side holds: blocks of 512 tokens, each in some pages, the least recently used going first.
class DecodeCache {
 public:
  explicit DecodeCache(std::uint32_t pages, std::uint64_t seed);

  std::uint32_t capacity() const noexcept { return capacity_; }
  /// True when the block is there; it counts as used now.
  bool touch(std::uint64_t hash);
  /// Makes room for a block that is not there and gives it `pages` pages (at most the capacity).
  const std::vector<std::uint32_t>& insert(std::uint64_t hash, std::uint32_t pages);

 private:
  struct Entry {
    std::uint64_t hash;
    std::vector<std::uint32_t> pages;
  };
  void evict_oldest();

  std::uint32_t capacity_;
  std::vector<std::uint32_t> free_pages_;
  std::list<Entry> entries_;  ///< most recently used first
  std::unordered_map<std::uint64_t, std::list<Entry>::iterator> by_hash_;
};

/// A page that travels.
struct PageMove {
  std::uint32_t prefill = 0;
  std::uint32_t decode = 0;
};

/// The transfers of one request: several only when it is larger than a pool.
struct RequestPlan {
  std::vector<std::vector<PageMove>> transfers;
  std::uint64_t pages_moved = 0;
  std::uint64_t pages_skipped = 0;  ///< held by the decode side already
};

class TracePlanner {
 public:
  TracePlanner(const KvPool& prefill, const KvPool& decode, std::uint64_t seed);

  /// What this request moves, given all requests planned before it.
  RequestPlan plan(const TraceRequest& request);

  /// The slices of one transfer: local is the decode side, remote the prefill side. Plane by plane, as
  /// layers become ready.
  std::vector<Slice> make_slices(const std::vector<PageMove>& moves) const;

 private:
  std::uint32_t next_prefill_page() noexcept;

  KvPool prefill_;
  KvPool decode_;
  DecodeCache cache_;
  std::vector<std::uint32_t> prefill_order_;  ///< pages in a scattered order, used in turn
  std::size_t next_prefill_ = 0;
};

}  // namespace kvferry::bench
