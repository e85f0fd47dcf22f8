#include "bench/trace_plan.hpp"

#include <algorithm>
#include <numeric>

namespace kvferry::bench {
namespace {

std::vector<std::uint32_t> scattered_pages(std::uint32_t pages, std::uint64_t seed) {
  std::vector<std::uint32_t> order(pages);
  std::iota(order.begin(), order.end(), 0u);
  Random random(seed);
  shuffle(order, random);
  return order;
}

/// Pages of block `index` of a request; only the last block may have fewer than 512 tokens.
std::uint32_t pages_of_block(const TraceRequest& request, std::size_t index, std::uint32_t page_tokens) {
  const std::uint64_t tokens = std::min<std::uint64_t>(hash_tokens, request.input_length - index * hash_tokens);
  return static_cast<std::uint32_t>((tokens + page_tokens - 1) / page_tokens);
}

}  // namespace

DecodeCache::DecodeCache(std::uint32_t pages, std::uint64_t seed)
    : capacity_(pages), free_pages_(scattered_pages(pages, seed)) {}

bool DecodeCache::touch(std::uint64_t hash) {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return false;
  entries_.splice(entries_.begin(), entries_, found->second);
  return true;
}

const std::vector<std::uint32_t>& DecodeCache::insert(std::uint64_t hash, std::uint32_t pages) {
  while (free_pages_.size() < pages) evict_oldest();
  entries_.push_front({hash, {free_pages_.end() - pages, free_pages_.end()}});
  free_pages_.resize(free_pages_.size() - pages);
  by_hash_[hash] = entries_.begin();
  return entries_.front().pages;
}

void DecodeCache::evict_oldest() {
  const Entry& oldest = entries_.back();
  free_pages_.insert(free_pages_.end(), oldest.pages.begin(), oldest.pages.end());
  by_hash_.erase(oldest.hash);
  entries_.pop_back();
}

TracePlanner::TracePlanner(const KvPool& prefill, const KvPool& decode, std::uint64_t seed)
    : prefill_(prefill),
      decode_(decode),
      cache_(decode.pages, mix(seed)),
      prefill_order_(scattered_pages(prefill.pages, mix(seed) + 1)) {}

std::uint32_t TracePlanner::next_prefill_page() noexcept {
  const std::uint32_t page = prefill_order_[next_prefill_];
  next_prefill_ = next_prefill_ + 1 == prefill_order_.size() ? 0 : next_prefill_ + 1;
  return page;
}

RequestPlan TracePlanner::plan(const TraceRequest& request) {
  // A transfer never uses a page of either pool twice, so that its bytes can be checked afterwards.
  const std::size_t most_pages = std::min(prefill_.pages, decode_.pages);
  RequestPlan plan;
  std::vector<PageMove> moves;
  for (std::size_t index = 0; index < request.hash_ids.size(); ++index) {
    const std::uint32_t pages = pages_of_block(request, index, decode_.model.block_tokens);
    if (cache_.touch(request.hash_ids[index])) {
      plan.pages_skipped += pages;
      continue;
    }
    if (moves.size() + pages > most_pages) plan.transfers.push_back(std::exchange(moves, {}));
    for (const std::uint32_t page : cache_.insert(request.hash_ids[index], pages)) {
      moves.push_back({next_prefill_page(), page});
    }
    plan.pages_moved += pages;
  }
  if (!moves.empty()) plan.transfers.push_back(std::move(moves));
  return plan;
}

std::vector<Slice> TracePlanner::make_slices(const std::vector<PageMove>& moves) const {
  std::vector<Slice> slices;
  slices.reserve(moves.size() * decode_.model.planes());
  for (std::uint32_t plane = 0; plane < decode_.model.planes(); ++plane) {
    for (const PageMove& move : moves) {
      slices.push_back(
          {decode_.offset(plane, move.decode), prefill_.offset(plane, move.prefill), decode_.model.block_bytes()});
    }
  }
  return slices;
}

}  // namespace kvferry::bench
