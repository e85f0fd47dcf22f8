#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/random.h>

#include <kvferry/kvcache/block_ranges.hpp>
#include <kvferry/kvcache/layer_stream.hpp>
#include <kvferry/kvcache/stream.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

constexpr std::size_t largest_message = 64 * 1024;
/// How long one receive waits; then it is posted anew.
constexpr Duration receive_limit = std::chrono::seconds(30);
constexpr Duration longest_sleep = std::chrono::seconds(1);

Result<std::uint64_t> random_id() {
  std::uint64_t id = 0;
  if (::getrandom(&id, sizeof id, 0) != sizeof id) return {Errc::internal, "the kernel gives no random numbers"};
  return id;
}

Status check_side(const StreamSide& side, const StreamOptions& options) {
  const LayoutSpec& spec = side.layout.spec();
  if (!side.region) return {Errc::invalid_argument, "layer stream: the region handle is empty"};
  if (side.rank >= spec.tp_size)
    return {Errc::invalid_argument, fmt::format("layer stream: rank {} of {}", side.rank, spec.tp_size)};
  if (options.limit <= Duration::zero()) return {Errc::invalid_argument, "layer stream: the limit must be above 0"};
  if (options.tokens.end < options.tokens.first)
    return {Errc::invalid_argument, fmt::format("layer stream: tokens {} to {}: the range ends before it begins",
                                                options.tokens.first, options.tokens.end)};
  if (options.payload == Payload::scales && !spec.scales)
    return {Errc::invalid_argument, "layer stream: scales are asked for, and the layout has none"};
  const std::uint64_t needed = (std::uint64_t{options.tokens.end} + spec.block_tokens - 1) / spec.block_tokens;
  if (side.blocks.size() < needed)
    return {Errc::out_of_bounds, fmt::format("layer stream: {} tokens need {} blocks, the table has {}",
                                             options.tokens.end, needed, side.blocks.size())};
  if (options.checksums && options.tokens.count() / spec.block_tokens >= max_layer_checksums)
    return {Errc::too_large,
            fmt::format("layer stream: {} tokens in blocks of {} are more than the {} checksums that a "
                        "layer may have",
                        options.tokens.count(), spec.block_tokens, max_layer_checksums)};
  return {};
}

/// The blocks that hold a token of the range.
std::span<const BlockId> blocks_in_use(const StreamSide& side, IndexRange tokens) {
  const std::uint32_t block_tokens = side.layout.spec().block_tokens;
  if (tokens.count() == 0) return {};
  const std::uint32_t first = tokens.first / block_tokens;
  const std::uint32_t last = (tokens.end - 1) / block_tokens;
  return std::span(side.blocks).subspan(first, last - first + 1);
}

}  // namespace

// ---------------------------------------------------------------- handles

StreamEnd::StreamEnd(std::shared_ptr<Stream> stream, std::string ticket)
    : stream_(std::move(stream)), ticket_(std::move(ticket)) {}
StreamEnd::StreamEnd(StreamEnd&&) noexcept = default;
StreamEnd& StreamEnd::operator=(StreamEnd&& other) noexcept {
  std::swap(stream_, other.stream_);
  std::swap(ticket_, other.ticket_);
  return *this;
}
StreamEnd::~StreamEnd() {
  if (stream_) abort("its handle was destroyed");
}

bool StreamEnd::ended() const { return stream_->ended(); }
Status StreamEnd::wait() const { return stream_->wait(); }

void StreamEnd::abort(std::string_view why) {
  stream_->post([text = fmt::format("the stream was ended: {}", why)](Stream& stream) {
    stream.fail({Errc::cancelled, text}, true);
  });
}

Status LayerProducer::push(std::uint32_t layer) {
  if (Status status = stream_->note_pushed(layer); !status) return status;
  stream_->post([layer](Stream& stream) { stream.push(layer); });
  return {};
}

Status LayerConsumer::wait_layer(std::uint32_t layer, Duration limit) const {
  return stream_->wait_layer(layer, limit);
}
bool LayerConsumer::arrived(std::uint32_t layer) const { return stream_->arrived(layer); }

// ---------------------------------------------------------------- the hub

class StreamHub::Impl {
 public:
  explicit Impl(Engine& engine) : engine_(engine), thread_([this] { run(); }) {}
  ~Impl() {
    tasks_->post([this] { stop(); });
    thread_.join();
  }

  /// The stream of whoever offers, and its ticket.
  Result<std::pair<std::shared_ptr<Stream>, std::string>> offer(StreamForm form, const Peer& peer, StreamSide side,
                                                                const StreamOptions& options);
  Result<std::shared_ptr<Stream>> take_part(StreamForm form, const Peer& peer, std::string_view ticket, StreamSide side,
                                            const StreamOptions& options);

 private:
  using Key = std::pair<std::uint64_t, std::uint64_t>;  ///< the peer's incarnation, the stream's number

  /// A receive that is always posted, so that the peer's messages are ours.
  struct Inbox {
    Peer peer;
    std::vector<std::byte> buffer = std::vector<std::byte>(largest_message);
    Transfer receive;
  };

  Result<std::shared_ptr<Stream>> add(Stream::Parts parts);
  void run();
  void stop();
  void begin(const std::shared_ptr<Stream>& stream);
  void receive(const std::shared_ptr<Inbox>& inbox);
  void on_received(const std::shared_ptr<Inbox>& inbox, const Status& status);
  void on_message(const Inbox& inbox, std::span<const std::byte> bytes);
  void answer_unknown(const Peer& peer, const StreamMessage& message);
  void tend();

  Engine& engine_;
  const std::shared_ptr<TaskQueue> tasks_ = std::make_shared<TaskQueue>();
  std::map<Key, std::shared_ptr<Stream>> streams_;
  std::map<std::uint64_t, std::shared_ptr<Inbox>> inboxes_;  ///< by the peer's incarnation
  bool stopping_ = false;
  std::thread thread_;
};

Result<std::pair<std::shared_ptr<Stream>, std::string>> StreamHub::Impl::offer(StreamForm form, const Peer& peer,
                                                                               StreamSide side,
                                                                               const StreamOptions& options) {
  if (Status status = check_side(side, options); !status) return status;
  const auto blocks = blocks_in_use(side, options.tokens);
  if (blocks.empty()) return {Errc::invalid_argument, "layer stream: the token range is empty"};
  if (side.blocks.size() > max_ticket_blocks)
    return {Errc::too_large, fmt::format("layer stream: a table of {} blocks, at most {} fit a ticket",
                                         side.blocks.size(), max_ticket_blocks)};
  const auto ranges = block_ranges(side.layout, blocks, {0, side.layout.spec().layers}, options.payload);
  if (!ranges) return ranges.status();
  const auto id = random_id();
  if (!id) return id.status();
  LeaseOptions terms;
  terms.access = form == StreamForm::push ? Access::write : Access::read;
  terms.time = options.limit;
  auto lease = engine_.lease(peer, side.region, *ranges, terms);
  if (!lease) return lease.status();

  StreamTicket ticket;
  ticket.form = form;
  ticket.stream = *id;
  ticket.incarnation = engine_.incarnation();
  ticket.lease = lease->name();
  ticket.layout = encode_layout(side.layout);
  ticket.rank = side.rank;
  ticket.blocks = side.blocks;
  ticket.tokens = options.tokens;
  ticket.payload = options.payload;
  ticket.checksums = options.checksums;

  Stream::Parts parts;
  parts.peer = peer;
  parts.id = *id;
  parts.form = form;
  parts.producer = form == StreamForm::pull;
  parts.side = std::move(side);
  parts.options = options;
  parts.lease = std::move(*lease);
  auto stream = add(std::move(parts));
  if (!stream) return stream.status();
  return std::pair(std::move(*stream), encode(ticket));
}

Result<std::shared_ptr<Stream>> StreamHub::Impl::take_part(StreamForm form, const Peer& peer, std::string_view bytes,
                                                           StreamSide side, const StreamOptions& options) {
  const auto ticket = decode_ticket(std::as_bytes(std::span(bytes)));
  if (!ticket) return ticket.status();
  if (ticket->form != form)
    return {Errc::invalid_argument, fmt::format("layer stream: the ticket was made to be {}",
                                                ticket->form == StreamForm::push ? "written to" : "read from")};
  if (!peer || ticket->incarnation != peer.incarnation())
    return {Errc::stale_peer, "layer stream: the ticket is not of this peer, or of a former life of it"};
  auto layout = decode_layout(std::as_bytes(std::span(ticket->layout)));
  if (!layout) return layout.status();
  const bool producer = form == StreamForm::push;
  Status exchange = producer ? check_exchange(side.layout, *layout) : check_exchange(*layout, side.layout);
  if (!exchange) return exchange;
  if (ticket->rank >= layout->spec().tp_size)
    return {Errc::malformed,
            fmt::format("layer stream: the ticket is of rank {} of {}", ticket->rank, layout->spec().tp_size)};
  StreamOptions terms = options;
  terms.tokens = ticket->tokens;
  terms.payload = ticket->payload;
  terms.checksums = ticket->checksums;
  if (Status status = check_side(side, terms); !status) return status;
  auto lease = engine_.find_region(peer, ticket->lease);
  if (!lease) return lease.status().with_context("layer stream: asking for the lease");

  Stream::Parts parts;
  parts.peer = peer;
  parts.id = ticket->stream;
  parts.form = form;
  parts.producer = producer;
  parts.side = std::move(side);
  parts.options = terms;
  parts.remote = Stream::Remote{std::move(*lease), std::move(*layout), ticket->blocks, ticket->rank};
  return add(std::move(parts));
}

Result<std::shared_ptr<Stream>> StreamHub::Impl::add(Stream::Parts parts) {
  parts.engine = &engine_;
  parts.tasks = tasks_;
  auto stream = std::make_shared<Stream>(std::move(parts));
  tasks_->post([this, stream] { begin(stream); });
  return stream;
}

// ---- from here on the hub's thread

void StreamHub::Impl::run() {
  ::prctl(PR_SET_NAME, "kvferry-layers");
  while (!stopping_ || !streams_.empty() || !inboxes_.empty()) {
    TimePoint next = Clock::now() + longest_sleep;
    for (const auto& [key, stream] : streams_) next = std::min(next, stream->next_tick());
    for (const auto& task : tasks_->take(next)) task();
    tend();
  }
  tasks_->close();
}

/// Ends what is over its time and forgets what has ended.
void StreamHub::Impl::tend() {
  const TimePoint now = Clock::now();
  for (const auto& [key, stream] : streams_)
    if (now >= stream->next_tick()) stream->tick(now);
  std::erase_if(streams_, [](const auto& entry) { return entry.second->finished(); });
}

void StreamHub::Impl::stop() {
  stopping_ = true;
  for (const auto& [key, stream] : streams_)
    stream->fail({Errc::shutting_down, "the side's streams are being destroyed"}, true);
  for (const auto& [life, inbox] : inboxes_) inbox->receive.cancel();
}

void StreamHub::Impl::begin(const std::shared_ptr<Stream>& stream) {
  const std::uint64_t life = stream->peer().incarnation();
  if (!streams_.emplace(Key{life, stream->id()}, stream).second)
    return stream->fail({Errc::already_exists, "this ticket is in use by another stream"}, false);
  if (stopping_) return stream->fail({Errc::shutting_down, "the side's streams are being destroyed"}, true);
  auto& inbox = inboxes_[life];
  if (!inbox) {
    inbox = std::make_shared<Inbox>();
    inbox->peer = stream->peer();
    receive(inbox);
  }
  stream->start();
}

void StreamHub::Impl::receive(const std::shared_ptr<Inbox>& inbox) {
  inbox->receive = engine_.recv(inbox->peer, inbox->buffer, {.deadline = receive_limit});
  inbox->receive.on_complete(
      [this, tasks = tasks_, inbox](const Status& status) {
        tasks->post([this, inbox, status] { on_received(inbox, status); });
      },
      Dispatch::in_place);
}

void StreamHub::Impl::on_received(const std::shared_ptr<Inbox>& inbox, const Status& status) {
  const std::uint64_t life = inbox->peer.incarnation();
  if (status) on_message(*inbox, std::span(inbox->buffer).first(inbox->receive.bytes()));
  if (!stopping_ && (status || status == Errc::timed_out)) return receive(inbox);
  inboxes_.erase(life);
  if (status || stopping_) return;
  for (const auto& [key, stream] : streams_)
    if (key.first == life) stream->fail(status.with_context("waiting for the peer's messages"), false);
}

void StreamHub::Impl::on_message(const Inbox& inbox, std::span<const std::byte> bytes) {
  const auto message = decode_stream_message(bytes);
  if (!message) {
    log(LogLevel::warning,
        fmt::format("dropped a message of peer '{}': {}", inbox.peer.name(), message.status().text()));
    return;
  }
  const auto found = streams_.find({inbox.peer.incarnation(), message->stream});
  if (found == streams_.end()) return answer_unknown(inbox.peer, *message);
  found->second->on_message(message->body);
}

/// Whoever still works on a stream that has ended here learns of it, should the first word have been lost.
void StreamHub::Impl::answer_unknown(const Peer& peer, const StreamMessage& message) {
  if (std::holds_alternative<StreamDone>(message.body) || std::holds_alternative<StreamFailed>(message.body)) return;
  StreamFailed failed{static_cast<std::uint32_t>(Errc::cancelled), "the stream has ended there"};
  const std::string bytes = encode(StreamMessage{message.stream, std::move(failed)});
  static_cast<void>(engine_.send(peer, std::as_bytes(std::span(bytes))));
}

// ---------------------------------------------------------------- StreamHub, the face

StreamHub::StreamHub(Engine& engine) : impl_(std::make_unique<Impl>(engine)) {}
StreamHub::~StreamHub() = default;

Result<LayerConsumer> StreamHub::offer_sink(const Peer& producer, StreamSide blocks, const StreamOptions& options) {
  auto offered = impl_->offer(StreamForm::push, producer, std::move(blocks), options);
  if (!offered) return offered.status();
  return LayerConsumer(std::move(offered->first), std::move(offered->second));
}

Result<LayerProducer> StreamHub::offer_source(const Peer& consumer, StreamSide blocks, const StreamOptions& options) {
  auto offered = impl_->offer(StreamForm::pull, consumer, std::move(blocks), options);
  if (!offered) return offered.status();
  return LayerProducer(std::move(offered->first), std::move(offered->second));
}

Result<LayerProducer> StreamHub::write_to(const Peer& consumer, std::string_view ticket, StreamSide blocks,
                                          const StreamOptions& options) {
  auto stream = impl_->take_part(StreamForm::push, consumer, ticket, std::move(blocks), options);
  if (!stream) return stream.status();
  return LayerProducer(std::move(*stream), std::string());
}

Result<LayerConsumer> StreamHub::read_from(const Peer& producer, std::string_view ticket, StreamSide blocks,
                                           const StreamOptions& options) {
  auto stream = impl_->take_part(StreamForm::pull, producer, ticket, std::move(blocks), options);
  if (!stream) return stream.status();
  return LayerConsumer(std::move(*stream), std::string());
}

}  // namespace kvferry
