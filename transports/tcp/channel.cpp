#include "channel.hpp"

#include <algorithm>
#include <random>

#include <fmt/format.h>

namespace kvferry::tcp {
namespace {

constexpr std::uint32_t most_channel_items = 64;

// Payload in flight on one channel, in chunks. With the default chunk 2 MiB: more than 100 Gb/s carry in
// 150 us, yet little enough that the kernel's buffers stay in the processor's cache (on loopback twice
// as fast as 16 MiB) and that what a cancelled transfer leaves in the pipe is drained at once.
constexpr std::uint64_t window_chunks = 8;

std::uint64_t random_nonce() {
  std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

Status cancelled() {
  static const Status status(Errc::cancelled, "cancelled");
  return status;
}

}  // namespace

PortLimits limits_of(const TcpConfig& config) noexcept {
  PortLimits limits;
  limits.item_bytes = config.chunk_bytes;
  limits.item_slices = max_descriptors;
  limits.whole_bytes = std::min<std::uint64_t>(64 << 10, config.chunk_bytes);
  limits.channel_items = most_channel_items;
  limits.side_by_side = static_cast<std::uint32_t>(config.sockets);
  return limits;
}

// ---- ChannelSocket

void ChannelSocket::push(Item& item) {
  item.socket = this;
  load_ += item.bytes;
  out_.push(item);
}

bool ChannelSocket::withdraw(Item& item) noexcept {
  if (!out_.remove(item)) return false;
  load_ -= item.bytes;
  return true;
}

void ChannelSocket::abandon(Item& item) noexcept {
  item.abandoned = true;
  if (current_ == &item && await_ == Await::payload) in_.discard_rest();
}

void ChannelSocket::on_open() { channel_.on_socket_open(); }

void ChannelSocket::on_failed(Failure /*failure*/, const Status& why) { channel_.on_socket_failed(number_, why); }

void ChannelSocket::on_sent(Outgoing& message) { static_cast<Item&>(message).sent = true; }

bool ChannelSocket::on_open_part() {
  switch (await_) {
    case Await::nothing:
      expect_response();
      return true;
    case Await::response:
      return take_response();
    case Await::payload:
      finish({});
      return true;
    case Await::text:
      return take_text();
  }
  return false;
}

void ChannelSocket::expect_response() {
  await_ = Await::response;
  in_.expect(raw_.data(), raw_.size());
}

bool ChannelSocket::take_response() {
  const auto response = decode_response(raw_.data());
  if (!response) return malformed("response");
  response_ = *response;
  if (response_.id == goodbye_id) {
    current_ = nullptr;
    return begin_text();
  }
  Item* item = channel_.items().find(response_.id);
  if (item == nullptr || item->socket != this || !item->sent) return malformed("response to nothing asked");
  current_ = item;
  return response_.status == Errc::ok ? begin_payload(*item) : begin_text();
}

bool ChannelSocket::begin_payload(Item& item) {
  const std::uint64_t expected = item.op == Op::read ? item.bytes : 0;
  if (response_.payload_bytes != expected) return malformed("response of another length");
  await_ = Await::payload;
  if (item.abandoned) {
    in_.expect_nothing_kept(expected);
  } else {
    in_.expect(item.local_parts(), expected);
  }
  return true;
}

bool ChannelSocket::begin_text() {
  await_ = Await::text;
  text_.resize(response_.text_bytes);
  in_.expect(reinterpret_cast<std::byte*>(text_.data()), text_.size());
  return true;
}

bool ChannelSocket::take_text() {
  if (current_ == nullptr) {
    fail(Failure::broken, {Errc::channel_error, "the peer closed the connection: " + text_});
    return false;
  }
  finish({response_.status, fmt::format("tcp: {} answered: {}", peer(), text_)});
  return true;
}

void ChannelSocket::finish(const Status& status) {
  Item& item = *std::exchange(current_, nullptr);
  load_ -= item.bytes;
  expect_response();
  channel_.complete(item, status);
}

// ---- Channel

Channel::Channel(ChannelHost& host, Loop& loop, const TcpConfig& config, ChannelId id, ChannelSpec spec, Endpoint peer)
    : host_(host),
      loop_(loop),
      config_(config),
      id_(id),
      spec_(std::move(spec)),
      endpoint_(peer),
      peer_(endpoint_.text()),
      nonce_(random_nonce()) {}

Status Channel::connect() {
  for (int i = 0; i < config_.sockets; ++i) {
    Result<Fd> fd = begin_connect(endpoint_, config_);
    if (!fd) return fd.status();
    const Hello hello{Purpose::data, static_cast<std::uint8_t>(i), spec_.token, spec_.target_incarnation, nonce_};
    sockets_.push_back(std::make_unique<ChannelSocket>(*this, loop_, std::move(*fd), hello, peer_));
    if (Status status = sockets_.back()->watch(); !status) return status;
  }
  return {};
}

void Channel::on_socket_open() {
  ++open_sockets_;
  if (up()) host_.on_up(*this);
}

void Channel::on_socket_failed(unsigned number, const Status& why) {
  if (ended_) return;
  const std::string where = fmt::format("tcp channel to {}, socket {} of {}", peer_, number + 1, config_.sockets);
  host_.on_lost(*this, why.with_context(where));
}

bool Channel::has_room() const noexcept {
  return in_flight_.size() < most_channel_items && bytes_in_flight_ < window_chunks * config_.chunk_bytes;
}

std::size_t Channel::post(std::span<const WorkItem> works) {
  if (!up()) return 0;
  std::size_t taken = 0;
  while (taken < works.size() && has_room() && take(works[taken])) ++taken;
  for (std::size_t i = 0; i < sockets_.size() && !ended_; ++i) sockets_[i]->send_queued();
  return taken;
}

bool Channel::take(const WorkItem& work) {
  if (Status status = check(work); !status) {
    host_.on_completion(work.cookie, status);
    return true;
  }
  Item* item = host_.items().take();
  if (item == nullptr) return false;
  item->prepare(work);
  item->index = in_flight_.size();
  in_flight_.push_back(item);
  bytes_in_flight_ += item->bytes;
  pick_socket(work).push(*item);
  return true;
}

Status Channel::check(const WorkItem& work) const {
  if (work.slices.count > max_descriptors) {
    return {Errc::too_large, fmt::format("tcp: {} slices in one item, at most {}", work.slices.count, max_descriptors)};
  }
  if (work.op == Op::send && work.message.size() > max_message_bytes) {
    return {Errc::too_large,
            fmt::format("tcp: message of {} bytes, at most {}", work.message.size(), max_message_bytes)};
  }
  return {};
}

// What has no payload to spread keeps its order by always taking the first socket.
ChannelSocket& Channel::pick_socket(const WorkItem& work) {
  if (work.op == Op::send || (work.op == Op::write_imm && work.slices.bytes == 0)) return *sockets_.front();
  const auto least_loaded = std::ranges::min_element(sockets_, {}, [](const auto& socket) { return socket->load(); });
  return **least_loaded;
}

void Channel::cancel(std::uint64_t cookie) {
  const auto wanted = [cookie](const Item* item) { return item->cookie == cookie && !item->abandoned; };
  const auto found = std::ranges::find_if(in_flight_, wanted);
  if (found == in_flight_.end()) return;
  Item& item = **found;
  if (item.socket->withdraw(item)) {
    release(item);
  } else if (item.op == Op::read) {
    item.socket->abandon(item);
  } else {
    return;
  }
  host_.on_completion(cookie, cancelled());
}

void Channel::complete(Item& item, const Status& status) {
  if (!item.abandoned) host_.on_completion(item.cookie, status);
  release(item);
}

void Channel::release(Item& item) {
  bytes_in_flight_ -= item.bytes;
  in_flight_[item.index] = in_flight_.back();
  in_flight_[item.index]->index = item.index;
  in_flight_.pop_back();
  host_.items().give(item);
}

Channel::UnsettledCookies Channel::end(const Status& why) {
  ended_ = true;
  open_sockets_ = 0;
  for (auto& socket : sockets_) {
    socket->abort();
    loop_.bury(std::move(socket));
  }
  sockets_.clear();
  UnsettledCookies unsettled;
  for (Item* item : in_flight_) {
    if (item->op != Op::read && item->begun) {
      unsettled.push_back(item->cookie);
    } else if (!item->abandoned) {
      host_.on_completion(item->cookie, why);
    }
    host_.items().give(*item);
  }
  in_flight_.clear();
  return unsettled;
}

}  // namespace kvferry::tcp
