#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/shm/server.hpp>

namespace kvferry::shm {
namespace {

constexpr std::uint32_t connection_events = EPOLLIN | EPOLLRDHUP;
constexpr std::uint32_t end_events = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
constexpr int packets_per_look = 64;
constexpr int accepts_per_look = 32;
/// A peer that lets more answers than this lie about does not read them at all.
constexpr std::size_t max_outgoing = 1024;
constexpr Duration accept_pause = std::chrono::milliseconds(100);
constexpr Duration offer_interval = std::chrono::milliseconds(1);
constexpr Duration quiet_look = std::chrono::microseconds(20);

std::uint64_t number_of(RegionKey key) noexcept { return std::uint64_t{key.slot} << 32 | key.generation; }

RegionKey key_of(std::uint64_t number) noexcept {
  return {static_cast<std::uint32_t>(number >> 32), static_cast<std::uint32_t>(number)};
}

bool any_busy(const ControlPage& page, const std::unordered_set<std::uint64_t>& given) {
  return std::any_of(given.begin(), given.end(), [&](std::uint64_t number) { return page.busy(key_of(number)); });
}

/// A descriptor to give away: one that can not be mapped for writing unless peers may write.
Result<Fd> descriptor_for(const RegionRecord& region) {
  Fd copy;
  if (allows(region.access, Access::write))
    copy = Fd(::fcntl(region.memfd, F_DUPFD_CLOEXEC, 0));
  else
    copy = Fd(::open(fmt::format("/proc/self/fd/{}", region.memfd).c_str(), O_RDONLY | O_CLOEXEC));
  if (copy) return copy;
  return {Errc::resource_exhausted, fmt::format("the owner can not pass its memory on: {}", std::strerror(errno))};
}

}  // namespace

Result<std::unique_ptr<Server>> Server::start(PortParts& parts) {
  Result<std::string> name = random_socket_name();
  if (!name) return name.status();
  Result<Fd> listener = listen_at(*name);
  if (!listener) return listener.status();
  std::unique_ptr<Server> server(new Server(std::move(*name), std::move(*listener), parts));
  if (::getrandom(server->nonce_.data(), server->nonce_.size(), 0) != static_cast<ssize_t>(server->nonce_.size()) ||
      !parts.epoll.add(server->listener_.get(), Watched::listener, 0, EPOLLIN))
    return {Errc::resource_exhausted, fmt::format("shm: listening: {}", std::strerror(errno))};
  return server;
}

Server::Server(std::string name, Fd listener, PortParts& parts)
    : name_(std::move(name)), listener_(std::move(listener)), parts_(parts) {}

Server::~Server() {
  std::vector<Connection*> all;
  for (const auto& [id, connection] : connections_) all.push_back(connection.get());
  close_quietly(all);
}

// ---- connections come and go

void Server::on_listener() {
  for (int i = 0; i < accepts_per_look; ++i) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // The listener would stay readable and keep the poller awake for nothing.
        log(LogLevel::warning, fmt::format("shm: no connection can be accepted for now: {}", std::strerror(errno)));
        parts_.epoll.remove(listener_.get());
        accept_again_at_ = Clock::now() + accept_pause;
      }
      return;
    }
    if (strangers_ >= max_strangers) continue;
    auto connection = std::make_unique<Connection>();
    connection->id = next_id_++;
    connection->socket = std::move(socket);
    connection->hello_by = Clock::now() + parts_.options.hello_limit;
    if (!parts_.epoll.add(connection->socket.get(), Watched::connection, connection->id, connection_events)) continue;
    ++strangers_;
    connections_.emplace(connection->id, std::move(connection));
  }
}

void Server::resume_accepting(TimePoint now) {
  if (now < accept_again_at_) return;
  accept_again_at_ = TimePoint::max();
  parts_.epoll.add(listener_.get(), Watched::listener, 0, EPOLLIN);
}

void Server::remove(std::uint32_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  if (!connection.welcomed) --strangers_;
  stalled_ -= connection.stalled.size();
  if (connection.page) connection.page.close_target();
  parts_.epoll.hang_up(connection.socket.get());
  connections_.erase(found);
}

/// Ends connections whose initiators may be copying at this moment.
void Server::close_quietly(std::span<Connection* const> connections) {
  for (const Connection* connection : connections)
    if (connection->page) connection->page.close_target();
  const TimePoint until = Clock::now() + quiet_limit;
  for (const Connection* connection : connections)
    while (connection->page && any_busy(connection->page, connection->given) && !hung_up(connection->socket.get()) &&
           Clock::now() < until)
      std::this_thread::sleep_for(quiet_look);
  for (const Connection* connection : connections) remove(connection->id);
}

void Server::drop_session(SessionId session) {
  std::vector<Connection*> dropped;
  for (const auto& [id, connection] : connections_)
    if (connection->welcomed && connection->session == session) dropped.push_back(connection.get());
  close_quietly(dropped);
}

bool Server::release_region(RegionKey key, bool force) {
  std::vector<Connection*> busy;
  std::vector<std::uint32_t> broken;
  for (const auto& [id, connection] : connections_) {
    if (!connection->given.contains(number_of(key))) continue;
    connection->page.revoke(key);
    // Whoever died in the middle of a copy left its mark standing.
    if (connection->page.busy(key) && !hung_up(connection->socket.get())) {
      busy.push_back(connection.get());
      continue;
    }
    connection->given.erase(number_of(key));
    RegionGonePacket gone;
    gone.key = key;
    if (!send(*connection, bytes_of(gone))) broken.push_back(id);
  }
  for (const std::uint32_t id : broken) remove(id);
  if (force) close_quietly(busy);
  return force || busy.empty();
}

void Server::tick(TimePoint now) {
  resume_accepting(now);
  if (strangers_ > 0) {
    std::vector<std::uint32_t> late;
    for (const auto& [id, connection] : connections_)
      if (!connection->welcomed && now >= connection->hello_by) late.push_back(id);
    for (const std::uint32_t id : late) remove(id);
  }
  if (stalled_ > 0)
    for (const auto& [id, connection] : connections_) offer_stalled(*connection);
}

TimePoint Server::next_wakeup(TimePoint now) const {
  TimePoint next = accept_again_at_;
  if (stalled_ > 0) next = std::min(next, now + offer_interval);
  if (strangers_ > 0)
    for (const auto& [id, connection] : connections_)
      if (!connection->welcomed) next = std::min(next, connection->hello_by);
  return next;
}

// ---- packets

void Server::on_connection(std::uint32_t id, std::uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  // What an initiator sent and then closed behind is not delivered: its items have ended already.
  bool keep = (events & end_events) == 0;
  if (keep && (events & EPOLLOUT) != 0) keep = flush(connection);
  for (int count = 0; keep && count < packets_per_look; ++count) {
    std::span<std::byte> packet;
    const IoResult result = receive_packet(connection.socket.get(), parts_.packet, packet);
    if (result == IoResult::again) return;
    keep = result == IoResult::done && on_packet(connection, packet);
  }
  if (!keep) remove(id);
}

bool Server::on_packet(Connection& connection, std::span<const std::byte> packet) {
  if (!connection.welcomed) return on_hello(connection, packet);
  const std::optional<PacketHeader> header = header_of(packet);
  if (header && header->magic == protocol_magic) {
    if (header->kind == PacketKind::region_request) {
      if (const auto request = decode<RegionRequestPacket>(packet)) return on_region_request(connection, request->key);
    } else if (header->kind == PacketKind::notification) {
      if (const auto note = decode<NotificationPacket>(packet))
        return on_delivery(connection, header->kind, note->number, note->sequence, note->immediate, {});
    } else if (header->kind == PacketKind::message && packet.size() >= sizeof(MessagePacket)) {
      const std::span<const std::byte> bytes = packet.subspan(sizeof(MessagePacket));
      const auto message = decode<MessagePacket>(packet.first(sizeof(MessagePacket)));
      if (message && bytes.size() <= max_message_bytes)
        return on_delivery(connection, header->kind, message->number, message->sequence, 0, bytes);
    }
  }
  log(LogLevel::warning, fmt::format("shm: session {} sent a malformed packet of {} bytes: its connection is closed",
                                     connection.session, packet.size()));
  return false;
}

bool Server::on_hello(Connection& connection, std::span<const std::byte> packet) {
  const Status status = admit(connection, packet);
  if (!status) {
    RefusalPacket refusal;
    refusal.why = PacketText::of(status);
    send(connection, bytes_of(refusal));
    log(LogLevel::info, fmt::format("shm: a connection was refused: {}", status.to_string()));
    return false;
  }
  connection.welcomed = true;
  --strangers_;
  WelcomePacket welcome;
  welcome.nonce = nonce_;
  welcome.nonce_address = reinterpret_cast<std::uintptr_t>(nonce_.data());
  return send(connection, bytes_of(welcome), Fd(::fcntl(connection.page.memfd(), F_DUPFD_CLOEXEC, 0)));
}

Status Server::admit(Connection& connection, std::span<const std::byte> packet) {
  const std::optional<PacketHeader> header = header_of(packet);
  if (!header || header->magic != protocol_magic || header->kind != PacketKind::hello)
    return {Errc::malformed, "shm: the first packet is no greeting of kvferry's"};
  if (header->version != protocol_version)
    return {Errc::version_mismatch, fmt::format("shm: the initiator speaks protocol version {}, the target version {}",
                                                header->version, protocol_version)};
  const std::optional<HelloPacket> hello = decode<HelloPacket>(packet);
  if (!hello) return {Errc::malformed, fmt::format("shm: a greeting of {} bytes", packet.size())};
  if (hello->target_incarnation != parts_.context.incarnation)
    return {Errc::stale_peer, fmt::format("shm: the channel is meant for incarnation {:016x}, this engine is {:016x}: "
                                          "it has been restarted, connect again",
                                          hello->target_incarnation, parts_.context.incarnation)};
  const std::optional<SessionId> session = parts_.events.authorize(hello->token);
  if (!session)
    return {Errc::access_denied, "shm: the target does not know the token: the session has ended, or it is forged"};
  Result<ControlPage> page = ControlPage::create();
  if (!page) return page.status();
  connection.session = *session;
  connection.page = std::move(*page);
  return {};
}

bool Server::on_region_request(Connection& connection, RegionKey key) {
  RegionReplyPacket reply;
  reply.key = key;
  Fd memfd;
  const Status status = describe_region(connection.session, key, reply, memfd);
  if (status) {
    connection.page.give(key);
    connection.given.insert(number_of(key));
  } else {
    reply.why = PacketText::of(status);
  }
  return send(connection, bytes_of(reply), std::move(memfd));
}

Status Server::describe_region(SessionId session, RegionKey key, RegionReplyPacket& reply, Fd& memfd) const {
  const RegionRecord* region = parts_.context.regions->find(key);
  if (region == nullptr) return {Errc::unknown_region, "its owner has unregistered it, or never had it"};
  if (region->kind != MemoryKind::host) return {Errc::no_path, "shared memory joins host memory only"};
  if (region->access == Access::none) return {Errc::access_denied, "its owner gives it to no peer"};
  if (region->lease) {
    if (Status status = region->lease->check(session, Clock::now()); !status) return status;
  }
  reply.size = region->size;
  reply.access = region->access;
  if (region->memfd < 0 || !parts_.options.map_regions) {
    reply.foreign = 1;
    reply.address = reinterpret_cast<std::uintptr_t>(region->data);
    return {};
  }
  Result<Fd> copy = descriptor_for(*region);
  if (!copy) return copy.status();
  memfd = std::move(*copy);
  return {};
}

bool Server::send(Connection& connection, std::span<const std::byte> bytes, Fd passed) {
  if (connection.outgoing.empty()) {
    const IoResult result = send_packet(connection.socket.get(), bytes, {}, passed.get());
    if (result != IoResult::again) return result == IoResult::done;
    parts_.epoll.change(connection.socket.get(), Watched::connection, connection.id, connection_events | EPOLLOUT);
  }
  if (connection.outgoing.size() == max_outgoing) return false;
  connection.outgoing.push_back({std::vector<std::byte>(bytes.begin(), bytes.end()), std::move(passed)});
  return true;
}

bool Server::flush(Connection& connection) {
  while (!connection.outgoing.empty()) {
    const Outgoing& first = connection.outgoing.front();
    const IoResult result = send_packet(connection.socket.get(), first.bytes, {}, first.passed.get());
    if (result == IoResult::again) return true;
    if (result != IoResult::done) return false;
    connection.outgoing.pop_front();
  }
  return parts_.epoll.change(connection.socket.get(), Watched::connection, connection.id, connection_events);
}

// ---- notifications and messages

bool Server::on_delivery(Connection& connection, PacketKind kind, std::uint64_t number, std::uint64_t sequence,
                         std::uint32_t immediate, std::span<const std::byte> bytes) {
  const bool overtakes = std::any_of(connection.stalled.begin(), connection.stalled.end(),
                                     [&](const Delivery& waiting) { return waiting.kind == kind; });
  if (!overtakes) {
    if (connection.page.initiator_closed()) return false;
    if (offer(connection, kind, sequence, immediate, bytes)) {
      AckPacket ack;
      ack.number = number;
      return send(connection, bytes_of(ack));
    }
  }
  if (connection.stalled.size() == max_unacknowledged) {
    log(LogLevel::warning, fmt::format("shm: session {} sent more than {} messages without waiting for an answer: its "
                                       "connection is closed",
                                       connection.session, max_unacknowledged));
    return false;
  }
  connection.stalled.push_back({kind, number, sequence, immediate, std::vector<std::byte>(bytes.begin(), bytes.end())});
  ++stalled_;
  return true;
}

bool Server::offer(Connection& connection, PacketKind kind, std::uint64_t sequence, std::uint32_t immediate,
                   std::span<const std::byte> bytes) {
  return kind == PacketKind::message ? parts_.events.on_message(connection.session, sequence, bytes)
                                     : parts_.events.on_notification(connection.session, sequence, immediate);
}

void Server::offer_stalled(Connection& connection) {
  // A full queue for messages does not hold up notifications, nor the other way round.
  bool messages_full = false;
  bool notifications_full = false;
  for (auto at = connection.stalled.begin(); at != connection.stalled.end();) {
    bool& full = at->kind == PacketKind::message ? messages_full : notifications_full;
    if (full || connection.page.initiator_closed() ||
        !offer(connection, at->kind, at->sequence, at->immediate, at->bytes)) {
      full = true;
      ++at;
      continue;
    }
    AckPacket ack;
    ack.number = at->number;
    // A connection that takes no more answers is found by its hang-up.
    send(connection, bytes_of(ack));
    at = connection.stalled.erase(at);
    --stalled_;
  }
}

}  // namespace kvferry::shm
