#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/kvcache/block_table.hpp>

namespace kvferry {

BlockTable::BlockTable(BlockPool& pool, std::string_view salt) : pool_(&pool), last_hash_(hash_salt(salt)) {}

Result<BlockTable> BlockTable::open(BlockPool& pool, std::span<const TokenId> tokens, std::string_view salt) {
  BlockTable table(pool, salt);
  table.blocks_ = pool.share(hash_prefix(tokens, pool.block_tokens(), salt));
  table.published_blocks_ = static_cast<std::uint32_t>(table.blocks_.size());
  table.shared_tokens_ = table.published_blocks_ * pool.block_tokens();
  if (Status status = table.append(tokens); !status) return status;
  return table;
}

BlockTable::BlockTable(BlockTable&& other) noexcept : pool_(other.pool_) { *this = std::move(other); }

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  if (this == &other) return *this;
  close();
  pool_ = other.pool_;
  blocks_ = std::exchange(other.blocks_, {});
  hashes_ = std::exchange(other.hashes_, {});
  open_block_ = std::exchange(other.open_block_, {});
  last_hash_ = other.last_hash_;
  tokens_ = std::exchange(other.tokens_, 0);
  shared_tokens_ = std::exchange(other.shared_tokens_, 0);
  published_blocks_ = std::exchange(other.published_blocks_, 0);
  return *this;
}

Status BlockTable::append(std::span<const TokenId> tokens) {
  const std::uint64_t block_tokens = pool_->block_tokens();
  const std::uint64_t total = tokens_ + std::uint64_t{tokens.size()};
  const std::uint64_t needed = (total + block_tokens - 1) / block_tokens;
  if (needed > pool_->size())
    return {Errc::resource_exhausted, fmt::format("{} tokens need {} KV blocks of {} tokens, but the pool has only {}",
                                                  total, needed, block_tokens, pool_->size())};
  if (needed > blocks_.size()) {
    auto more = pool_->allocate(static_cast<std::uint32_t>(needed - blocks_.size()));
    if (!more) return more.status();
    blocks_.insert(blocks_.end(), more->begin(), more->end());
  }
  for (const TokenId token : tokens) add_token(token);
  return {};
}

void BlockTable::add_token(TokenId token) {
  open_block_.push_back(token);
  ++tokens_;
  if (open_block_.size() < pool_->block_tokens()) return;
  last_hash_ = hash_block(last_hash_, open_block_);
  hashes_.push_back(last_hash_);
  open_block_.clear();
}

Status BlockTable::publish(std::uint32_t tokens) {
  if (tokens > tokens_)
    return {Errc::out_of_bounds,
            fmt::format("the KV of {} tokens is said to be there, but the block table has {}", tokens, tokens_)};
  for (; published_blocks_ < tokens / pool_->block_tokens(); ++published_blocks_) {
    const auto shared = pool_->publish(blocks_[published_blocks_], hashes_[published_blocks_]);
    if (!shared) return shared.status();
  }
  return {};
}

void BlockTable::close() noexcept {
  std::ranges::reverse(blocks_);
  static_cast<void>(pool_->release(blocks_));  // the table holds what it releases, so this can not fail
  blocks_.clear();
  hashes_.clear();
  open_block_.clear();
  tokens_ = shared_tokens_ = published_blocks_ = 0;
}

}  // namespace kvferry
