#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include <kvferry/transports/verbs/send_queue.hpp>

namespace kvferry::verbs {

SendQueue::SendQueue(std::unique_ptr<QueuePair> pair, Api& api, std::uint32_t slot)
    : pair_(std::move(pair)), api_(api), slot_(slot), signal_every_(std::max(1u, pair_->depth() / 4)) {
  const std::size_t places = std::bit_ceil(std::size_t{pair_->depth()});
  mask_ = places - 1;
  posted_.resize(places);
  requests_.resize(pair_->depth());
  pieces_.resize(std::size_t{pair_->depth()} * pair_->max_pieces());
}

ChainOutcome SendQueue::post() {
  ChainOutcome outcome;
  if (chained_ == 0) return outcome;
  // Whoever waits for the chain's end is told without anything having to follow.
  signal_last();
  ibv_send_wr* bad = nullptr;
  outcome.error = api_.post_send(pair_->get(), requests_.data(), &bad);
  outcome.accepted = chained_;
  if (outcome.error != 0) {
    // Some providers give -1 and errno, the manual says errno itself.
    if (outcome.error < 0) outcome.error = errno;
    outcome.accepted = bad == nullptr ? 0 : static_cast<std::uint32_t>(bad - requests_.data());
    // The signal may have been in what was refused.
    since_signal_ = signal_every_;
  }
  next_ += outcome.accepted;
  chained_ = 0;
  return outcome;
}

}  // namespace kvferry::verbs
