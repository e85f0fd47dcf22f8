#include "server_connection.hpp"

#include <algorithm>
#include <array>
#include <iterator>

#include <fmt/format.h>
#include <sys/socket.h>

#include <kvferry/runtime/log.hpp>

namespace kvferry::tcp {
namespace {

// More answers than this unsent: the peer does not read, so its requests are not read either.
constexpr std::size_t most_unsent_answers = 256;

constexpr std::size_t most_stalled = 128;

static_assert(hello_bytes <= request_bytes, "both are received into one buffer");
static_assert(sizeof(iovec) == descriptor_bytes, "descriptors are received where their parts will be");

// Short texts into an empty socket buffer: what does not fit at once is not worth a queue.
bool send_whole(int fd, std::span<const std::byte> bytes) noexcept {
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

std::span<const std::byte> bytes_of(std::string_view text) noexcept { return std::as_bytes(std::span(text)); }

}  // namespace

ServerConnection::ServerConnection(ConnectionHost& host, Loop& loop, Fd fd, std::string peer, TimePoint hello_by)
    : Stream(loop, std::move(fd)), host_(host), peer_(std::move(peer)), hello_by_(hello_by) {
  in_.expect(fixed_.data(), hello_prefix_bytes);
}

ServerConnection::~ServerConnection() { release_answers(); }

bool ServerConnection::run() {
  // What a vanished initiator left in the socket's buffer must not be applied: nobody would learn of it.
  if (hung_up_) break_off({Errc::channel_error, "the peer closed the connection"});
  return Stream::run();
}

bool ServerConnection::may_receive() const { return unsent_answers_ < most_unsent_answers; }

bool ServerConnection::on_part() {
  switch (await_) {
    case Await::hello_prefix:
      return take_hello_prefix();
    case Await::hello:
      return take_hello();
    case Await::request:
      return take_request();
    case Await::descriptors:
      return take_descriptors();
    case Await::payload:
    case Await::refused_payload:
      return take_payload();
    case Await::message:
      return take_message();
  }
  return false;
}

// ---- greeting

bool ServerConnection::take_hello_prefix() {
  const auto version = decode_hello_version(fixed_.data());
  if (!version) return malformed("the first bytes are no hello");
  if (*version != protocol_version) {
    return refuse({Errc::version_mismatch, fmt::format("tcp protocol version: the initiator speaks {}, the target {}",
                                                       *version, protocol_version)});
  }
  await_ = Await::hello;
  in_.expect(fixed_.data() + hello_prefix_bytes, hello_bytes - hello_prefix_bytes);
  return true;
}

bool ServerConnection::take_hello() {
  const auto hello = decode_hello(fixed_.data());
  if (!hello) return malformed("hello");
  hello_ = *hello;
  if (hello_.incarnation != host_.context().incarnation) {
    return refuse({Errc::stale_peer, fmt::format("the target is incarnation {:016x}, the channel is meant for {:016x}: "
                                                 "connect again",
                                                 host_.context().incarnation, hello_.incarnation)});
  }
  return hello_.purpose == Purpose::fence ? confirm_fence() : admit();
}

// The token is not looked up: that the session ended does not mean that its connections have.
bool ServerConnection::confirm_fence() {
  host_.fence(hello_);
  send_reply({});
  close();
  host_.on_closed(*this);
  return false;
}

bool ServerConnection::admit() {
  const std::optional<SessionId> session = host_.events().authorize(hello_.token);
  if (!session) {
    return refuse({Errc::access_denied, "the target does not know this token: its session ended or never was"});
  }
  session_ = *session;
  if (!send_reply({})) return malformed("a hello that does not take its reply");
  authenticated_ = true;
  host_.on_authenticated(*this);
  expect_request();
  return true;
}

bool ServerConnection::refuse(const Status& why) {
  log(LogLevel::info, fmt::format("tcp: refused {}: {}", peer_, why.to_string()));
  send_reply(why);
  close();
  host_.on_closed(*this);
  return false;
}

bool ServerConnection::send_reply(const Status& status) {
  const std::string_view text = status.text().substr(0, max_text_bytes);
  std::array<std::byte, hello_reply_bytes + max_text_bytes> reply;
  encode(HelloReply{protocol_version, status.code(), static_cast<std::uint16_t>(text.size())}, reply.data());
  std::ranges::copy(bytes_of(text), reply.begin() + hello_reply_bytes);
  return send_whole(fd_.get(), std::span(reply).first(hello_reply_bytes + text.size()));
}

// ---- requests

void ServerConnection::expect_request() {
  await_ = Await::request;
  in_.expect(fixed_.data(), request_bytes);
}

bool ServerConnection::take_request() {
  const auto request = decode_request(fixed_.data());
  if (!request) return malformed("request");
  request_ = *request;
  if (request_.op == Op::send) {
    message_.resize(request_.payload_bytes);
    await_ = Await::message;
    in_.expect(message_.data(), message_.size());
    return true;
  }
  current_ = &host_.answers().take();
  current_->parts.resize(1 + request_.descriptors);
  await_ = Await::descriptors;
  in_.expect(reinterpret_cast<std::byte*>(current_->parts.data() + 1), request_.descriptors * descriptor_bytes);
  return true;
}

bool ServerConnection::take_descriptors() {
  if (!descriptors_add_up()) return malformed("descriptors");
  const Status verdict = locate();
  if (request_.op != Op::read) return begin_payload(verdict);
  answer(request_.id, verdict, verdict ? request_.payload_bytes : 0);
  expect_request();
  return true;
}

bool ServerConnection::descriptors_add_up() const noexcept {
  std::uint64_t left = request_.payload_bytes;
  const auto* raw = reinterpret_cast<const std::byte*>(current_->parts.data() + 1);
  for (std::uint32_t i = 0; i < request_.descriptors; ++i) {
    const Descriptor descriptor = decode_descriptor(raw + i * descriptor_bytes);
    if (descriptor.length == 0 || descriptor.length > left) return false;
    left -= descriptor.length;
  }
  return left == 0;
}

// Turns the descriptors, in place, into the region's memory that they mean.
Status ServerConnection::locate() {
  if (request_.op == Op::write_imm && request_.descriptors == 0) return {};
  const RegionRecord* record = host_.context().regions->find(request_.region);
  if (record == nullptr) {
    return {Errc::unknown_region, fmt::format("the target has no region with key {}.{} (any more)",
                                              request_.region.slot, request_.region.generation)};
  }
  if (record->kind != MemoryKind::host) {
    return {Errc::unsupported, fmt::format("region '{}' is not host memory, tcp can not serve it", record->name)};
  }
  const Access need = request_.op == Op::read ? Access::read : Access::write;
  if (!allows(record->access, need)) {
    return {Errc::access_denied, fmt::format("region '{}' does not allow {}", record->name, to_string(request_.op))};
  }
  if (record->lease) {
    if (Status status = record->lease->check(session_, Clock::now()); !status) return status;
  }
  std::size_t hint = 0;
  for (iovec& part : std::span(current_->parts).subspan(1)) {
    if (Status status = locate_part(*record, part, hint); !status) return status;
  }
  current_->region = request_.region;
  current_->touches_region = true;
  return {};
}

Status ServerConnection::locate_part(const RegionRecord& record, iovec& part, std::size_t& hint) const {
  const Descriptor descriptor = decode_descriptor(reinterpret_cast<const std::byte*>(&part));
  if (!fits(descriptor.offset, descriptor.length, record.size)) {
    return {Errc::out_of_bounds, fmt::format("slice of {} bytes at remote offset {} leaves region '{}' of {} bytes",
                                             descriptor.length, descriptor.offset, record.name, record.size)};
  }
  if (record.lease && !record.lease->ranges.covers(descriptor.offset, descriptor.length, hint)) {
    return {Errc::access_denied,
            fmt::format("slice of {} bytes at remote offset {} leaves what is leased of region '{}'", descriptor.length,
                        descriptor.offset, record.lease->region->name)};
  }
  part = {record.data + descriptor.offset, descriptor.length};
  return {};
}

bool ServerConnection::begin_payload(const Status& verdict) {
  verdict_ = verdict;
  await_ = verdict ? Await::payload : Await::refused_payload;
  if (verdict) {
    in_.expect(std::span(current_->parts).subspan(1), request_.payload_bytes);
  } else {
    in_.expect_nothing_kept(request_.payload_bytes);
  }
  return true;
}

bool ServerConnection::take_payload() {
  const bool notify = verdict_.is_ok() && request_.op == Op::write_imm;
  const Status verdict = std::exchange(verdict_, {});
  const Request request = request_;
  expect_request();
  if (notify) {
    host_.answers().give(*std::exchange(current_, nullptr));
    return offer({request.id, request.op, request.sequence, request.immediate, {}}, {});
  }
  answer(request.id, verdict);
  return true;
}

bool ServerConnection::take_message() {
  expect_request();
  return offer({request_.id, request_.op, request_.sequence, 0, {}}, message_);
}

// ---- notifications and messages

bool ServerConnection::offer(Stalled offer, std::span<const std::byte> message) {
  if (!same_kind_stalled(offer.op) && deliver(offer, message)) {
    answer(offer.id, {});
    return true;
  }
  if (stalled_.size() == most_stalled) {
    drop({Errc::resource_exhausted, fmt::format("the target has no room for notifications or messages and holds {} "
                                                "of this connection back already",
                                                most_stalled)});
    return false;
  }
  offer.message.assign(message.begin(), message.end());
  stalled_.push_back(std::move(offer));
  return true;
}

bool ServerConnection::deliver(const Stalled& offer, std::span<const std::byte> message) {
  if (offer.op == Op::send) return host_.events().on_message(session_, offer.sequence, message);
  return host_.events().on_notification(session_, offer.sequence, offer.immediate);
}

bool ServerConnection::same_kind_stalled(Op op) const noexcept {
  return std::ranges::any_of(stalled_, [op](const Stalled& stalled) { return stalled.op == op; });
}

// Each kind in its order; a kind that is refused once is not asked again this time.
void ServerConnection::retry_stalled() {
  bool message_refused = false;
  bool immediate_refused = false;
  for (auto at = stalled_.begin(); at != stalled_.end();) {
    bool& refused = at->op == Op::send ? message_refused : immediate_refused;
    refused = refused || !deliver(*at, at->message);
    if (refused) {
      ++at;
      continue;
    }
    answer(at->id, {});
    at = stalled_.erase(at);
  }
  flush();
}

// ---- answers

void ServerConnection::answer(std::uint32_t id, const Status& status, std::uint64_t payload_bytes) {
  if (current_ == nullptr) {
    current_ = &host_.answers().take();
    current_->parts.resize(1);
  }
  Answer& ready = *std::exchange(current_, nullptr);
  ready.respond(id, status, payload_bytes);
  ++unsent_answers_;
  out_.push(ready);
}

void ServerConnection::on_sent(Outgoing& message) {
  --unsent_answers_;
  host_.answers().give(static_cast<Answer&>(message));
}

bool ServerConnection::touches(RegionKey region) const noexcept {
  if (current_ != nullptr && current_->touches_region && current_->region == region) return true;
  for (const Outgoing* message = out_.first(); message != nullptr; message = message->next) {
    const auto& queued = static_cast<const Answer&>(*message);
    if (queued.touches_region && queued.region == region) return true;
  }
  return false;
}

// ---- the end

bool ServerConnection::malformed(const char* what) {
  break_off({Errc::malformed, fmt::format("malformed: {}", what)});
  return false;
}

void ServerConnection::drop(const Status& why) {
  if (closed()) return;
  if (authenticated_ && out_.empty()) {
    const std::string_view text = why.text().substr(0, max_text_bytes);
    std::array<std::byte, response_bytes + max_text_bytes> goodbye;
    encode(Response{goodbye_id, why.code(), static_cast<std::uint16_t>(text.size()), 0}, goodbye.data());
    std::ranges::copy(bytes_of(text), goodbye.begin() + response_bytes);
    send_whole(fd_.get(), std::span(goodbye).first(response_bytes + text.size()));
  }
  break_off(why);
}

void ServerConnection::on_broken(const Status& why) {
  log(LogLevel::info, fmt::format("tcp: connection from {} ended: {}", peer_, why.text()));
  release_answers();
  stalled_.clear();
  host_.on_closed(*this);
}

void ServerConnection::release_answers() noexcept {
  if (current_ != nullptr) host_.answers().give(*std::exchange(current_, nullptr));
  while (Outgoing* message = out_.pop()) host_.answers().give(static_cast<Answer&>(*message));
}

}  // namespace kvferry::tcp
