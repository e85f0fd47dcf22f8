// One end of a layer stream: what to do when a layer is computed, a message comes, a transfer ends. Internal.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <kvferry/kvcache/block_checksum.hpp>
#include <kvferry/kvcache/layer_stream.hpp>
#include <kvferry/kvcache/stream_message.hpp>
#include <kvferry/kvcache/task_queue.hpp>

namespace kvferry {

/// Everything but the functions under "any thread" runs on the hub's thread.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  /// The side that offered, as whoever takes part knows it from the ticket.
  struct Remote {
    RemoteHandle lease;
    Layout layout;
    std::vector<BlockId> blocks;
    std::uint32_t rank = 0;
  };
  struct Parts {
    Engine* engine = nullptr;
    std::shared_ptr<TaskQueue> tasks;
    Peer peer;
    std::uint64_t id = 0;
    StreamForm form = StreamForm::push;
    bool producer = false;
    std::optional<StreamSide> side;  ///< always there once the stream is made
    StreamOptions options;
    std::optional<Lease> lease;    ///< of the side that offers
    std::optional<Remote> remote;  ///< of the side that takes part
  };

  explicit Stream(Parts parts);

  // ---- any thread
  Status note_pushed(std::uint32_t layer);
  Status wait_layer(std::uint32_t layer, Duration limit) const;
  bool arrived(std::uint32_t layer) const;
  bool ended() const;
  Status wait() const;
  void post(std::function<void(Stream&)> task);

  // ---- the hub's thread
  void start();
  void push(std::uint32_t layer);
  void on_message(const StreamBody& body);
  /// The stream fails; the peer is told unless it was the peer that said so.
  void fail(const Status& why, bool tell_peer);
  void tick(TimePoint now);
  /// When tick wants to be called.
  TimePoint next_tick() const { return retry_revoke_ > TimePoint() ? retry_revoke_ : until_; }
  bool finished() const { return finished_; }
  std::uint64_t id() const { return parts_.id; }
  const Peer& peer() const { return parts_.peer; }

 private:
  struct Layer {
    bool computed = false;
    bool moved = false;  ///< its transfer is under way or has been
    bool retried = false;
    bool arrived = false;
    std::vector<std::uint64_t> sums;
  };

  // ---- messages
  void handle(const OpenStream& open);
  void handle(const LayerReady& ready);
  void handle(const LayerAgain& again);
  void handle(const StreamDone& done);
  void handle(const StreamFailed& failed);
  void send(StreamBody body, bool needed);
  void refuse(std::string_view what);

  // ---- layers
  void announce(std::uint32_t layer);
  void move_layer(std::uint32_t layer);
  void on_moved(std::uint32_t layer, const Status& status);
  void received(std::uint32_t layer);
  void again(std::uint32_t layer, std::size_t bad_unit);
  Result<std::vector<std::uint64_t>> checksums(std::uint32_t layer) const;
  Status corrupted(std::uint32_t layer, std::size_t bad_unit) const;

  // ---- the end
  void succeed();
  bool quieten();
  void finish();

  Parts parts_;
  const TimePoint until_;
  HeadRange heads_;
  std::uint32_t unit_tokens_ = 1;
  bool opened_ = false;
  std::vector<Layer> layers_;
  std::uint32_t layers_done_ = 0;
  std::list<Transfer> transfers_;  ///< of layers, under way
  std::optional<Status> ending_;
  TimePoint retry_revoke_{};
  bool finished_ = false;

  mutable std::mutex mutex_;  ///< guards what follows, for the handles
  mutable std::condition_variable changed_;
  std::vector<bool> noted_;  ///< producer: pushed; consumer: arrived
  bool ended_ = false;
  Status outcome_;
};

}  // namespace kvferry
