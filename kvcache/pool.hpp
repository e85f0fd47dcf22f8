// Which blocks of a pool are free, in use, or kept because their prefix may be asked for again.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include <kvferry/kvcache/layout.hpp>
#include <kvferry/kvcache/prefix_hash.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// Every block is in exactly one of these at any time, so they add up to the pool's size.
struct PoolCounts {
  std::uint32_t free = 0;    ///< empty
  std::uint32_t cached = 0;  ///< nobody holds them, but their prefix can still be shared
  std::uint32_t used = 0;    ///< held by at least one reference

  /// Blocks that allocate() can give out.
  std::uint32_t available() const noexcept { return free + cached; }
  friend bool operator==(const PoolCounts&, const PoolCounts&) = default;
};

/// Hands out block ids; knows nothing of the bytes. Blocks that were published under a prefix hash are
/// kept after their last release, and the least recently released ones are emptied when allocate()
/// needs them. All functions are safe on any thread, and each takes effect as a whole or not at all.
///
/// Misuse is invalid_argument and changes nothing: an id beyond the pool, a block that is not in use.
class BlockPool {
 public:
  /// Ids 0 to blocks - 1, all free. A block_tokens of 0 counts as 1.
  BlockPool(std::uint32_t blocks, std::uint32_t block_tokens);
  /// One pool for all layers, parts and heads of a layout.
  explicit BlockPool(const Layout& layout) : BlockPool(layout.spec().blocks, layout.spec().block_tokens) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }
  std::uint32_t block_tokens() const noexcept { return block_tokens_; }
  PoolCounts counts() const;
  /// How many references hold a block.
  Result<std::uint32_t> references(BlockId id) const;

  /// `count` blocks with one reference each: free ones first, then cached ones from the least recently
  /// released. Error: resource_exhausted (fewer are available).
  Result<std::vector<BlockId>> allocate(std::uint32_t count);

  /// One more reference for each block; an id that stands there twice gets two. The blocks are in use.
  Status reference(std::span<const BlockId> ids);

  /// One reference less for each block. The last one makes it cached when it was published, else free;
  /// blocks that come first are emptied first, so give a sequence's blocks from its end to its start.
  Status release(std::span<const BlockId> ids);

  /// Lets others share a block: its KV is complete, and nobody writes to it from now on. The answer is
  /// the block that is shared under this hash: `id`, or the one that was published before it; then `id`
  /// stays as it is, unshared. Error: also a block that is published under another hash.
  Result<BlockId> publish(BlockId id, const PrefixHash& hash);

  /// The blocks of the longest run of hashes, from the first on, that are all published, with one more
  /// reference each; empty when the first is not there.
  std::vector<BlockId> share(std::span<const PrefixHash> hashes);

  /// Frees all cached blocks and forgets every published prefix; blocks in use stay so. For new weights.
  void forget_prefixes();

 private:
  static constexpr BlockId none = UINT32_MAX;

  enum class State : std::uint8_t { free, cached, used };

  struct Block {
    std::uint32_t references = 0;
    State state = State::free;
    bool published = false;
    PrefixHash hash;
    BlockId older = none;  ///< neighbours among the cached blocks
    BlockId newer = none;
  };

  Status check_used(BlockId id) const;
  Status drop_references(std::span<const BlockId> ids);
  void retire(BlockId id);
  void make_free(BlockId id);
  BlockId take_one();
  void push_cached(BlockId id);
  void pull_cached(BlockId id);

  const std::uint32_t block_tokens_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  std::vector<BlockId> free_;
  std::unordered_map<PrefixHash, BlockId, PrefixHasher> by_hash_;
  std::uint32_t cached_ = 0;
  BlockId oldest_ = none;
  BlockId newest_ = none;
};

}  // namespace kvferry
