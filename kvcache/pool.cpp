#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvferry/kvcache/pool.hpp>

namespace kvferry {

BlockPool::BlockPool(std::uint32_t blocks, std::uint32_t block_tokens)
    : block_tokens_(std::max(block_tokens, 1u)), blocks_(blocks) {
  // Taken from the end, so that a fresh pool gives out neighbours in ascending order: they merge in plans.
  free_.reserve(blocks);
  for (BlockId id = blocks; id > 0; --id) free_.push_back(id - 1);
}

PoolCounts BlockPool::counts() const {
  const std::lock_guard lock(mutex_);
  const auto free = static_cast<std::uint32_t>(free_.size());
  return {free, cached_, size() - free - cached_};
}

Result<std::uint32_t> BlockPool::references(BlockId id) const {
  const std::lock_guard lock(mutex_);
  if (id >= size())
    return {Errc::invalid_argument, fmt::format("block {} is not of this pool, which has {} blocks", id, size())};
  return blocks_[id].references;
}

Result<std::vector<BlockId>> BlockPool::allocate(std::uint32_t count) {
  const std::lock_guard lock(mutex_);
  if (count > free_.size() + cached_)
    return {Errc::resource_exhausted,
            fmt::format("{} KV blocks are asked for, but of {} only {} are free and {} cached: wait until sequences "
                        "end, or preempt one",
                        count, size(), free_.size(), cached_)};
  std::vector<BlockId> ids(count);
  for (BlockId& id : ids) {
    id = take_one();
    blocks_[id].state = State::used;
    blocks_[id].references = 1;
  }
  return ids;
}

Status BlockPool::reference(std::span<const BlockId> ids) {
  const std::lock_guard lock(mutex_);
  for (const BlockId id : ids)
    if (Status status = check_used(id); !status) return status;
  for (const BlockId id : ids) ++blocks_[id].references;
  return {};
}

Status BlockPool::release(std::span<const BlockId> ids) {
  const std::lock_guard lock(mutex_);
  if (Status status = drop_references(ids); !status) return status;
  for (const BlockId id : ids) retire(id);
  return {};
}

Result<BlockId> BlockPool::publish(BlockId id, const PrefixHash& hash) {
  const std::lock_guard lock(mutex_);
  if (Status status = check_used(id); !status) return status;
  Block& block = blocks_[id];
  if (block.published && block.hash != hash)
    return {Errc::invalid_argument, fmt::format("block {} is published under another prefix already", id)};
  const auto [place, fresh] = by_hash_.try_emplace(hash, id);
  if (fresh) {
    block.published = true;
    block.hash = hash;
  }
  return place->second;
}

std::vector<BlockId> BlockPool::share(std::span<const PrefixHash> hashes) {
  const std::lock_guard lock(mutex_);
  std::vector<BlockId> ids;
  for (const PrefixHash& hash : hashes) {
    const auto found = by_hash_.find(hash);
    if (found == by_hash_.end()) break;
    Block& block = blocks_[found->second];
    if (block.state == State::cached) pull_cached(found->second);
    block.state = State::used;
    ++block.references;
    ids.push_back(found->second);
  }
  return ids;
}

void BlockPool::forget_prefixes() {
  const std::lock_guard lock(mutex_);
  while (oldest_ != none) {
    const BlockId id = oldest_;
    pull_cached(id);
    make_free(id);
  }
  for (const auto& [hash, id] : by_hash_) blocks_[id].published = false;
  by_hash_.clear();
}

// ---------------------------------------------------------------- with the lock held

Status BlockPool::check_used(BlockId id) const {
  if (id >= size())
    return {Errc::invalid_argument, fmt::format("block {} is not of this pool, which has {} blocks", id, size())};
  if (blocks_[id].references == 0)
    return {Errc::invalid_argument, fmt::format("block {} is not in use: it was released before, or never given out "
                                                "to whoever names it",
                                                id)};
  return {};
}

/// All or none. Counting down while checking finds an id that stands there more often than it is held.
Status BlockPool::drop_references(std::span<const BlockId> ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (Status status = check_used(ids[i]); !status) {
      for (const BlockId id : ids.first(i)) ++blocks_[id].references;
      return status;
    }
    --blocks_[ids[i]].references;
  }
  return {};
}

/// An id may stand in the list twice: only the first one finds the block still marked as used.
void BlockPool::retire(BlockId id) {
  Block& block = blocks_[id];
  if (block.references > 0 || block.state != State::used) return;
  if (block.published)
    push_cached(id);
  else
    make_free(id);
}

void BlockPool::make_free(BlockId id) {
  blocks_[id].state = State::free;
  free_.push_back(id);
}

/// A free block, or the least recently released cached one, emptied; there is one.
BlockId BlockPool::take_one() {
  if (free_.empty()) {
    const BlockId id = oldest_;
    pull_cached(id);
    by_hash_.erase(blocks_[id].hash);
    blocks_[id].published = false;
    return id;
  }
  const BlockId id = free_.back();
  free_.pop_back();
  return id;
}

void BlockPool::push_cached(BlockId id) {
  Block& block = blocks_[id];
  block.state = State::cached;
  block.older = newest_;
  block.newer = none;
  (newest_ == none ? oldest_ : blocks_[newest_].newer) = id;
  newest_ = id;
  ++cached_;
}

void BlockPool::pull_cached(BlockId id) {
  const Block& block = blocks_[id];
  (block.older == none ? oldest_ : blocks_[block.older].newer) = block.newer;
  (block.newer == none ? newest_ : blocks_[block.newer].older) = block.older;
  --cached_;
}

}  // namespace kvferry
