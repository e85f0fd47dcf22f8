// Posting: chains of requests with one doorbell each, never more than the queue holds.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/connection.hpp>
#include <kvferry/transports/verbs/device_side.hpp>

namespace kvferry::verbs {

/// What became of a chain that was handed to the device.
struct ChainOutcome {
  std::uint32_t accepted = 0;  ///< requests, a prefix
  int error = 0;               ///< errno that the next one was refused with
};

/// A queue pair and the ring of what it has in flight. The device completes requests in order, so one
/// signalled completion ends all that were posted before it.
class SendQueue {
 public:
  /// `slot` comes back in the high half of each completion's wr_id.
  SendQueue(std::unique_ptr<QueuePair> pair, Api& api, std::uint32_t slot);

  QueuePair& pair() noexcept { return *pair_; }
  std::uint32_t slot() const noexcept { return slot_; }
  std::uint32_t in_flight() const noexcept { return static_cast<std::uint32_t>(next_ - oldest_); }
  /// Requests that may be added to the chain.
  std::uint32_t room() const noexcept { return pair_->depth() - in_flight() - chained_; }
  std::uint32_t chained() const noexcept { return chained_; }

  /// A cleared request at the end of the chain, with place for max_pieces() pieces in sg_list. Needs room.
  ibv_send_wr& add(const Posted& posted) {
    ibv_send_wr& request = requests_[chained_];
    request = {};
    request.wr_id = std::uint64_t{slot_} << 32 | static_cast<std::uint32_t>(next_ + chained_);
    request.sg_list = pieces_.data();
    if (chained_ > 0) {
      // Pieces stand close together: most requests have one, and few cache lines hold them all.
      ibv_send_wr& previous = requests_[chained_ - 1];
      previous.next = &request;
      request.sg_list = previous.sg_list + previous.num_sge;
    }
    posted_[(next_ + chained_) & mask_] = posted;
    ++chained_;
    // The queue's places come free only by completions, whatever the chain's owner asks for.
    if (++since_signal_ >= signal_every_) signal_last();
    return request;
  }
  /// Asks for a completion as soon as the last request added has ended.
  void signal_last() noexcept {
    requests_[chained_ - 1].send_flags |= IBV_SEND_SIGNALED;
    since_signal_ = 0;
  }
  /// Of those in flight, the one that was posted `back` requests ago; 1 is the last.
  const Posted& posted_before(std::uint32_t back) const noexcept { return posted_[(next_ - back) & mask_]; }
  /// Rings the doorbell; the chain is empty afterwards.
  ChainOutcome post();

  /// Takes what a completion of wr_id's low half ends, oldest first, and calls end(posted, last) for each;
  /// `last` marks the request that the completion is of.
  template <class End>
  void retire(std::uint32_t number, End&& end) {
    const auto distance = static_cast<std::uint32_t>(number - static_cast<std::uint32_t>(oldest_));
    if (distance >= in_flight()) return;
    for (std::uint32_t i = 0; i <= distance; ++i) {
      const Posted posted = posted_[oldest_ & mask_];
      ++oldest_;
      end(posted, i == distance);
    }
  }
  /// The number of the last request in flight: retire() of it ends all.
  std::uint32_t newest() const noexcept { return static_cast<std::uint32_t>(next_ - 1); }

 private:
  std::unique_ptr<QueuePair> pair_;
  Api& api_;
  const std::uint32_t slot_;
  const std::uint32_t signal_every_;
  std::uint64_t mask_ = 0;
  std::vector<Posted> posted_;  ///< ring, by number
  std::vector<ibv_send_wr> requests_;
  std::vector<ibv_sge> pieces_;
  std::uint64_t oldest_ = 0;
  std::uint64_t next_ = 0;
  std::uint32_t chained_ = 0;
  std::uint32_t since_signal_ = 0;
};

}  // namespace kvferry::verbs
