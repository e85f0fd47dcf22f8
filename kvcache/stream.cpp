#include <algorithm>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include <kvferry/kvcache/stream.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {
namespace {

constexpr Duration revoke_pause = std::chrono::seconds(1);

TimePoint after(Duration limit) {
  const TimePoint now = Clock::now();
  return limit < TimePoint::max() - now ? now + limit : TimePoint::max();
}

/// The heads that go from one rank to the other.
HeadRange exchanged_heads(const Layout& source, std::uint32_t source_rank, const Layout& destination,
                          std::uint32_t destination_rank) {
  const HeadRange from = source.heads_of(source_rank);
  const HeadRange to = destination.heads_of(destination_rank);
  const std::uint32_t first = std::max(from.first, to.first);
  const std::uint32_t end = std::min(from.end(), to.end());
  if (end <= first || !sends_heads(source, source_rank, destination, destination_rank)) return {};
  return {first, end - first};
}

}  // namespace

Stream::Stream(Parts parts)
    : parts_(std::move(parts)),
      until_(after(parts_.options.limit)),
      unit_tokens_(parts_.side->layout.spec().block_tokens),
      layers_(parts_.side->layout.spec().layers),
      noted_(layers_.size()) {
  if (!parts_.remote) return;
  const Layout& here = parts_.side->layout;
  const Remote& there = *parts_.remote;
  heads_ = parts_.producer ? exchanged_heads(here, parts_.side->rank, there.layout, there.rank)
                           : exchanged_heads(there.layout, there.rank, here, parts_.side->rank);
  if (parts_.producer) unit_tokens_ = there.layout.spec().block_tokens;
}

// ---------------------------------------------------------------- any thread

Status Stream::note_pushed(std::uint32_t layer) {
  const std::lock_guard lock(mutex_);
  if (ended_) return outcome_ ? Status(Errc::invalid_argument, "the stream has ended with ok already") : outcome_;
  if (layer >= noted_.size())
    return {Errc::invalid_argument, fmt::format("layer {} was pushed, the layout has {}", layer, noted_.size())};
  if (noted_[layer]) return {Errc::invalid_argument, fmt::format("layer {} was pushed before", layer)};
  noted_[layer] = true;
  return {};
}

Status Stream::wait_layer(std::uint32_t layer, Duration limit) const {
  std::unique_lock lock(mutex_);
  if (layer >= noted_.size())
    return {Errc::invalid_argument, fmt::format("layer {} was asked for, the layout has {}", layer, noted_.size())};
  changed_.wait_until(lock, after(limit), [&] { return ended_ || noted_[layer]; });
  if (ended_ && !outcome_) return outcome_;
  if (noted_[layer]) return {};
  return {Errc::timed_out, fmt::format("layer {} has not arrived from peer '{}' yet", layer, parts_.peer.name())};
}

bool Stream::arrived(std::uint32_t layer) const {
  const std::lock_guard lock(mutex_);
  return layer < noted_.size() && noted_[layer];
}

bool Stream::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

// The hub's thread ends every stream by its limit.
Status Stream::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ended_; });
  return outcome_;
}

void Stream::post(std::function<void(Stream&)> task) {
  parts_.tasks->post([self = shared_from_this(), task = std::move(task)] { task(*self); });
}

// ---------------------------------------------------------------- messages

void Stream::start() {
  if (!parts_.remote) return;
  opened_ = true;
  send(OpenStream{heads_, parts_.producer ? 1 : unit_tokens_}, true);
}

void Stream::on_message(const StreamBody& body) {
  if (ending_) return;
  std::visit([this](const auto& message) { handle(message); }, body);
}

void Stream::refuse(std::string_view what) {
  fail({Errc::malformed, fmt::format("peer '{}' sent {}, which has no place in this stream", parts_.peer.name(), what)},
       true);
}

void Stream::handle(const OpenStream& open) {
  const HeadRange held = parts_.side->layout.heads_of(parts_.side->rank);
  const bool none = open.heads.count == 0;
  if (parts_.remote || opened_ || open.unit_tokens == 0 ||
      (!none && (open.heads.first < held.first || open.heads.count > held.count ||
                 open.heads.first - held.first > held.count - open.heads.count)))
    return refuse("a greeting");
  opened_ = true;
  heads_ = open.heads;
  if (!parts_.producer) return;
  unit_tokens_ = open.unit_tokens;
  for (std::uint32_t layer = 0; layer < layers_.size() && !ending_; ++layer)
    if (layers_[layer].computed) announce(layer);
}

void Stream::handle(const LayerReady& ready) {
  if (parts_.producer || !opened_ || ready.layer >= layers_.size() || layers_[ready.layer].arrived)
    return refuse("a layer");
  Layer& layer = layers_[ready.layer];
  if (parts_.form == StreamForm::pull && layer.moved) return refuse("a layer twice");
  layer.sums = ready.checksums;
  if (parts_.form == StreamForm::pull)
    move_layer(ready.layer);
  else
    received(ready.layer);
}

void Stream::handle(const LayerAgain& again) {
  if (!parts_.producer || parts_.form == StreamForm::pull || again.layer >= layers_.size() ||
      !layers_[again.layer].moved || layers_[again.layer].retried)
    return refuse("a request to repeat a layer");
  layers_[again.layer].retried = true;
  move_layer(again.layer);
}

void Stream::handle(const StreamDone& /*done*/) {
  const bool all = std::all_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.computed; });
  if (!parts_.producer || !opened_ || !all) return refuse("the end of a stream that is not complete");
  succeed();
}

void Stream::handle(const StreamFailed& failed) {
  const bool known = failed.code > 0 && failed.code <= static_cast<std::uint32_t>(Errc::internal);
  fail({known ? static_cast<Errc>(failed.code) : Errc::internal,
        fmt::format("peer '{}' ended the stream: {}", parts_.peer.name(), failed.text)},
       false);
}

void Stream::send(StreamBody body, bool needed) {
  const std::string bytes = encode(StreamMessage{parts_.id, std::move(body)});
  TransferOptions options;
  options.priority = parts_.options.priority;
  options.deadline = std::max<Duration>(until_ - Clock::now(), std::chrono::milliseconds(100));
  const Transfer sent = parts_.engine->send(parts_.peer, std::as_bytes(std::span(bytes)), options);
  if (!needed) return;
  sent.on_complete(
      [self = shared_from_this()](const Status& status) {
        if (!status) self->post([status](Stream& stream) { stream.fail(status, false); });
      },
      Dispatch::in_place);
}

// ---------------------------------------------------------------- layers

void Stream::push(std::uint32_t layer) {
  if (ending_) return;
  layers_[layer].computed = true;
  if (parts_.form == StreamForm::push || opened_) announce(layer);
}

void Stream::announce(std::uint32_t layer) {
  if (parts_.options.checksums) {
    auto sums = checksums(layer);
    if (!sums) return fail(sums.status(), true);
    layers_[layer].sums = std::move(*sums);
  }
  if (parts_.form == StreamForm::push)
    move_layer(layer);
  else
    send(LayerReady{layer, layers_[layer].sums}, true);
}

/// Only on the side that takes part: it has both layouts.
void Stream::move_layer(std::uint32_t layer) {
  const StreamSide& side = *parts_.side;
  const PlanSide here{&side.layout, side.blocks, side.rank};
  const PlanSide there{&parts_.remote->layout, parts_.remote->blocks, parts_.remote->rank};
  PlanRequest request;
  request.source = parts_.producer ? here : there;
  request.destination = parts_.producer ? there : here;
  request.tokens = parts_.options.tokens;
  request.layers = {layer, layer + 1};
  request.initiator = parts_.producer ? Initiator::source : Initiator::destination;
  request.payload = parts_.options.payload;
  const auto plan = make_plan(request);
  if (!plan) return fail(plan.status(), true);
  layers_[layer].moved = true;
  TransferOptions options;
  options.priority = parts_.options.priority;
  options.deadline = std::max<Duration>(until_ - Clock::now(), std::chrono::milliseconds(1));
  const Transfer moving = parts_.producer
                              ? parts_.engine->write(parts_.peer, side.region, parts_.remote->lease, *plan, options)
                              : parts_.engine->read(parts_.peer, side.region, parts_.remote->lease, *plan, options);
  const auto place = transfers_.insert(transfers_.end(), moving);
  moving.on_complete(
      [self = shared_from_this(), layer, place](const Status& status) {
        self->post([status, layer, place](Stream& stream) {
          stream.transfers_.erase(place);
          stream.on_moved(layer, status);
        });
      },
      Dispatch::in_place);
}

void Stream::on_moved(std::uint32_t layer, const Status& status) {
  if (ending_) return finish();
  if (!status) return fail(status.with_context(fmt::format("layer {}", layer)), true);
  if (parts_.producer)
    send(LayerReady{layer, layers_[layer].sums}, true);
  else
    received(layer);
}

void Stream::received(std::uint32_t number) {
  Layer& layer = layers_[number];
  if (parts_.options.checksums) {
    const auto sums = checksums(number);
    if (!sums) return fail(sums.status(), true);
    if (layer.sums.size() != sums->size()) return refuse("checksums of another number of blocks");
    const auto bad = std::mismatch(sums->begin(), sums->end(), layer.sums.begin()).first;
    if (bad != sums->end()) return again(number, static_cast<std::size_t>(bad - sums->begin()));
  }
  layer.arrived = true;
  {
    const std::lock_guard lock(mutex_);
    noted_[number] = true;
  }
  changed_.notify_all();
  if (++layers_done_ == layers_.size()) succeed();
}

void Stream::again(std::uint32_t layer, std::size_t bad_unit) {
  const Status why = corrupted(layer, bad_unit);
  if (std::exchange(layers_[layer].retried, true)) return fail(why, true);
  log(LogLevel::warning, fmt::format("{}; fetching the layer once more", why.to_string()));
  if (parts_.form == StreamForm::push)
    send(LayerAgain{layer}, true);
  else
    move_layer(layer);
}

Result<std::vector<std::uint64_t>> Stream::checksums(std::uint32_t layer) const {
  ChecksumRequest request;
  request.side = {&parts_.side->layout, parts_.side->blocks, parts_.side->rank};
  request.payload = parts_.options.payload;
  request.tokens = parts_.options.tokens;
  request.unit_tokens = unit_tokens_;
  request.heads = heads_;
  if (heads_.count == 0) request.heads.first = parts_.side->layout.heads_of(parts_.side->rank).first;
  if (request.tokens.count() / unit_tokens_ >= max_layer_checksums)
    return {Errc::too_large,
            fmt::format("{} tokens in blocks of {} are more than the {} checksums that a layer may have",
                        request.tokens.count(), unit_tokens_, max_layer_checksums)};
  return block_checksums(request, layer, parts_.side->region.bytes());
}

/// Only the consumer finds out, so the blocks are its own.
Status Stream::corrupted(std::uint32_t layer, std::size_t bad_unit) const {
  const IndexRange tokens = parts_.options.tokens;
  const std::size_t unit = tokens.first / unit_tokens_ + bad_unit;
  return {
      Errc::corrupted,
      fmt::format("layer {}, block {} (tokens {} to {} of the sequence) from peer '{}': the bytes that arrived do not "
                  "have the checksum of those that were sent",
                  layer, parts_.side->blocks[unit], std::max<std::size_t>(unit * unit_tokens_, tokens.first),
                  std::min<std::size_t>((unit + 1) * unit_tokens_, tokens.end), parts_.peer.name())};
}

// ---------------------------------------------------------------- the end

void Stream::succeed() {
  ending_.emplace();
  // The blocks are the program's from here on: first nobody else may write them.
  if (quieten() && !parts_.producer) send(StreamDone{}, false);
  finish();
}

void Stream::fail(const Status& why, bool tell_peer) {
  if (ending_) return;
  ending_ = why;
  for (const Transfer& transfer : transfers_) transfer.cancel();
  quieten();
  if (tell_peer)
    send(StreamFailed{static_cast<std::uint32_t>(why.code()), std::string(why.text().substr(0, max_stream_text))},
         false);
  finish();
}

/// Takes the lease back; true once there is none.
bool Stream::quieten() {
  if (!parts_.lease) return true;
  if (Status status = parts_.engine->revoke(*parts_.lease); !status) {
    log(LogLevel::error, status.with_context("the blocks of a stream stay in use").to_string());
    retry_revoke_ = Clock::now() + revoke_pause;
    return false;
  }
  parts_.lease.reset();
  retry_revoke_ = {};
  return true;
}

void Stream::tick(TimePoint now) {
  if (retry_revoke_ > TimePoint() && now >= retry_revoke_ && quieten()) finish();
  if (!ending_ && now >= until_)
    fail({Errc::timed_out,
          fmt::format("the stream with peer '{}' was not complete in time: {} of {} layers {}", parts_.peer.name(),
                      parts_.producer ? std::count_if(layers_.begin(), layers_.end(),
                                                      [](const Layer& layer) { return layer.computed; })
                                      : layers_done_,
                      layers_.size(), parts_.producer ? "were pushed" : "have arrived")},
         true);
}

/// The end, unless something still touches the blocks.
void Stream::finish() {
  if (finished_ || parts_.lease || !transfers_.empty()) return;
  finished_ = true;
  parts_.side->hold.reset();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  outcome_ = *ending_;
  changed_.notify_all();
}

}  // namespace kvferry
