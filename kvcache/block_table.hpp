// The blocks of one sequence, and which of them others may share.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <kvferry/kvcache/pool.hpp>
#include <kvferry/kvcache/prefix_hash.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// A sequence's block table: blocks()[i] holds tokens [i * block_tokens, (i + 1) * block_tokens). Holds
/// one reference to each block and releases them when it is destroyed or closed. Only full blocks are
/// ever shared, so appending never writes to a block that another sequence reads.
///
/// The pool must outlive the table. Used by one thread at a time; many tables may use one pool.
class BlockTable {
 public:
  /// A table for these tokens: the blocks of the longest published prefix are shared, the rest is
  /// allocated. `salt`: hash_salt. A prefill that needs the last token's output should open the table
  /// without that token and append it, so that at least one token is left to compute.
  /// Error: resource_exhausted; nothing is held then.
  static Result<BlockTable> open(BlockPool& pool, std::span<const TokenId> tokens, std::string_view salt = {});

  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&& other) noexcept;
  ~BlockTable() { close(); }

  /// Makes room for more tokens. Error: resource_exhausted; the table is as before.
  Status append(std::span<const TokenId> tokens);

  /// Says that the KV of the first `tokens` tokens lies in the blocks, computed here or arrived by a
  /// transfer: full blocks among them can be shared from now on. Nothing is shared that was not
  /// published. Error: out_of_bounds (more than the table has).
  Status publish(std::uint32_t tokens);

  std::span<const BlockId> blocks() const noexcept { return blocks_; }
  std::uint32_t tokens() const noexcept { return tokens_; }
  /// Tokens from the start whose KV was there when the table was opened.
  std::uint32_t shared_tokens() const noexcept { return shared_tokens_; }

  /// Releases all blocks, the last one first: a prefix is worth more than what follows it. No-op when done.
  void close() noexcept;

 private:
  BlockTable(BlockPool& pool, std::string_view salt);

  void add_token(TokenId token);

  BlockPool* pool_;
  std::vector<BlockId> blocks_;
  std::vector<PrefixHash> hashes_;   ///< of the full blocks
  std::vector<TokenId> open_block_;  ///< tokens of the block that is not full yet
  PrefixHash last_hash_;
  std::uint32_t tokens_ = 0;
  std::uint32_t shared_tokens_ = 0;
  std::uint32_t published_blocks_ = 0;
};

}  // namespace kvferry
