// Layer streams: the KV blocks of one sequence go from producer to consumer layer by layer, each as soon as it is
// computed, while the next is being computed.
//
// One side offers its blocks and gets a ticket; the program carries the ticket to the other side by its own means (the
// request that says "prefill this", for instance), which takes part and moves the bytes:
//
//   form   offers                       takes part
//   push   the consumer, offer_sink     the producer, write_to: writes each layer into the consumer's blocks
//   pull   the producer, offer_source   the consumer, read_from: reads each layer from the producer's blocks
//
// Both engines must be connected to each other, each by a connect() of its own. What is offered is leased to that peer
// alone, until the stream ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <kvferry/actors/engine.hpp>
#include <kvferry/kvcache/layout.hpp>
#include <kvferry/kvcache/plan.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

/// One side's blocks of a sequence on one rank. Ranks and, in a quantized cache, scales are streams of their own.
struct StreamSide {
  Region region;  ///< of the values, or of the scales; host memory if checksums are asked for
  Layout layout;
  std::vector<BlockId> blocks;  ///< block table from the first token on; blocks outside the token range are not used
  std::uint32_t rank = 0;       ///< of the layout's tp_size
  /// Kept until nothing touches the blocks any more, then let go, however the stream ends: a shared pointer to the
  /// BlockTable, for instance. Whoever needs the blocks afterwards keeps a copy of it. Its deleter runs on the streams'
  /// thread and must not wait for a stream.
  std::shared_ptr<const void> hold = {};
};

struct StreamOptions {
  IndexRange tokens;  ///< positions in the sequence
  Payload payload = Payload::values;
  /// A checksum (XXH3) of each block goes with each layer and is verified on arrival. A layer that does not fit is
  /// fetched once more; if it does not fit then, the stream ends with corrupted, which names layer and block. Needs at
  /// most 8000 blocks in the token range.
  bool checksums = false;
  Duration limit = std::chrono::seconds(30);  ///< then the stream ends with timed_out, and the lease with it
  Priority priority = Priority::normal;
};

class StreamHub;
class Stream;

/// What both ends have. A stream ends once, with ok or one error, when no byte of the blocks moves for it any more and
/// `hold` has been let go. All functions may be called from any thread. Destroying it before the end ends the stream
/// with cancelled; it does not wait.
class StreamEnd {
 public:
  StreamEnd(StreamEnd&&) noexcept;
  StreamEnd& operator=(StreamEnd&&) noexcept;
  ~StreamEnd();

  /// What the other side needs to take part; empty on the side that took part itself.
  const std::string& ticket() const noexcept { return ticket_; }
  bool ended() const;
  /// Waits for the end, which StreamOptions::limit bounds, and returns the outcome.
  Status wait() const;
  /// Ends the stream on both sides with cancelled and this text, unless it has ended. Returns at once.
  void abort(std::string_view why);

 protected:
  friend class StreamHub;
  StreamEnd(std::shared_ptr<Stream> stream, std::string ticket);

  std::shared_ptr<Stream> stream_;
  std::string ticket_;
};

/// The end that computes. Its blocks of a pushed layer must not change until the end; that comes with ok when the
/// consumer has everything.
class LayerProducer : public StreamEnd {
 public:
  using StreamEnd::StreamEnd;
  /// The layer is computed: it goes out now. Any order, each layer once. Returns at once.
  /// Errors: invalid_argument (no such layer, pushed before), or what the stream ended with.
  Status push(std::uint32_t layer);
};

/// The end that waits for layers. The end comes with ok when all of them are here.
class LayerConsumer : public StreamEnd {
 public:
  using StreamEnd::StreamEnd;
  /// Waits until the layer is here, and verified. Errors: timed_out (after `limit`; the stream goes on),
  /// invalid_argument, or what the stream ended with: then what has arrived is not to be used either.
  Status wait_layer(std::uint32_t layer, Duration limit) const;
  bool arrived(std::uint32_t layer) const;
};

/// All layer streams of one engine. It receives the messages of every peer that it has had a stream with; the program
/// must not recv() from these itself. The engine must outlive it and stay where it is. Thread-safe; has one thread.
class StreamHub {
 public:
  explicit StreamHub(Engine& engine);
  /// Ends all streams (shutting_down) and returns once they are quiet.
  ~StreamHub();
  StreamHub(const StreamHub&) = delete;
  StreamHub& operator=(const StreamHub&) = delete;

  // Each of these returns without waiting for the peer, except write_to and read_from, which ask it for the lease, for
  // at most connect_timeout. The region of an offer must be leasable (RegisterOptions) for writes or reads.
  // Errors: those of Engine::lease, block_ranges and Engine::find_region; malformed, stale_peer (a ticket of another
  // life of the peer), unsupported (check_exchange), invalid_argument (options, or a ticket of the other form).
  Result<LayerConsumer> offer_sink(const Peer& producer, StreamSide blocks, const StreamOptions& options);
  Result<LayerProducer> offer_source(const Peer& consumer, StreamSide blocks, const StreamOptions& options);
  /// Tokens, payload and checksums are the ticket's; `options` gives limit and priority.
  Result<LayerProducer> write_to(const Peer& consumer, std::string_view ticket, StreamSide blocks,
                                 const StreamOptions& options = {});
  Result<LayerConsumer> read_from(const Peer& producer, std::string_view ticket, StreamSide blocks,
                                  const StreamOptions& options = {});

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
