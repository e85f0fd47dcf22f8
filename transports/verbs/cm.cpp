#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>

#include <kvferry/transports/verbs/cm.hpp>
#include <kvferry/transports/verbs/cm_wire.hpp>

namespace kvferry::verbs {
namespace {

constexpr int backlog = 1024;
constexpr int events_per_poll = 64;
constexpr std::uint8_t receiver_not_ready_retries = 7;
// Reasons of a rejection (IBTA, REJ): those that an operator can do something about.
constexpr int stale_connection = 10;
constexpr int nobody_listens = 8;
constexpr int refused_by_user = 28;

/// An address as the socket functions have it.
class SocketAddress {
 public:
  SocketAddress(const RawGid& raw, std::uint16_t port) {
    if (family_of(raw) == GidFamily::ipv4) {
      sockaddr_in four{};
      four.sin_family = AF_INET;
      four.sin_port = htons(port);
      std::memcpy(&four.sin_addr, raw.data() + 12, 4);
      std::memcpy(&storage_, &four, sizeof four);
      return;
    }
    sockaddr_in6 six{};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    std::memcpy(&six.sin6_addr, raw.data(), raw.size());
    std::memcpy(&storage_, &six, sizeof six);
  }
  /// Link-local addresses mean something on one interface only.
  void set_scope(std::uint32_t scope) {
    sockaddr_in6 six{};
    std::memcpy(&six, &storage_, sizeof six);
    if (six.sin6_family != AF_INET6) return;
    six.sin6_scope_id = scope;
    std::memcpy(&storage_, &six, sizeof six);
  }
  sockaddr* get() noexcept { return reinterpret_cast<sockaddr*>(&storage_); }

 private:
  sockaddr_storage storage_{};
};

std::uint32_t scope_of(const RawGid& ours) {
  for (const InterfaceAddress& one : interface_addresses())
    if (one.address == ours) return one.scope;
  return 0;
}

int milliseconds_until(TimePoint then) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(then - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 1, 60'000));
}

void give_data(rdma_conn_param& parameters, std::span<const std::byte> data) {
  parameters.private_data = data.data();
  parameters.private_data_len = static_cast<std::uint8_t>(data.size());
}

}  // namespace

// ---------------------------------------------------------------- CmId

Result<std::unique_ptr<CmId>> CmId::create(CmApi& api, rdma_event_channel* events, CmOwner& owner, std::uint64_t tag) {
  rdma_cm_id* id = nullptr;
  if (api.create_id(events, &id, nullptr) != 0)
    return {Errc::resource_exhausted, fmt::format("verbs: rdma_create_id: {}", std::strerror(errno))};
  auto made = std::make_unique<CmId>(api, id, owner);
  made->tag_ = tag;
  return made;
}

CmId::~CmId() { api_.destroy_id(id_); }

Status CmId::failed(const char* what) const {
  return {Errc::channel_error, fmt::format("verbs: {}: {}", what, std::strerror(errno))};
}

bool CmId::is_on(const Device& device) const {
  return id_->verbs != nullptr && id_->port_num == device.facts.port &&
         device.facts.device == device.context->api().get_device_name(id_->verbs->device);
}

std::string CmId::place() const {
  return id_->verbs == nullptr
             ? std::string("no device")
             : fmt::format("{}:{}", static_cast<const char*>(id_->verbs->device->name), id_->port_num);
}

Status CmId::resolve_address(const RawGid& from, const RawGid& to, std::uint16_t port, const VerbsConfig& config,
                             TimePoint give_up) {
  auto traffic_class = static_cast<std::uint8_t>(config.traffic_class);
  if (traffic_class != 0 &&
      api_.set_option(id_, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &traffic_class, sizeof traffic_class) != 0)
    return failed("setting verbs.traffic_class with librdmacm");
  SocketAddress source(from, 0);
  SocketAddress destination(to, port);
  const std::uint32_t scope = scope_of(from);
  source.set_scope(scope);
  destination.set_scope(scope);
  if (api_.resolve_addr(id_, source.get(), destination.get(), milliseconds_until(give_up)) == 0) return {};
  return {Errc::unreachable, fmt::format("verbs: no way from {} to {} through librdmacm: {}", to_string(from),
                                         to_string(to), std::strerror(errno))};
}

Status CmId::resolve_route(TimePoint give_up) {
  return api_.resolve_route(id_, milliseconds_until(give_up)) == 0 ? Status() : failed("rdma_resolve_route");
}

Status CmId::connect(const QueuePair& pair, std::uint32_t reads_out, const VerbsConfig& config,
                     std::span<const std::byte> data) {
  rdma_conn_param parameters{};
  give_data(parameters, data);
  parameters.initiator_depth = static_cast<std::uint8_t>(reads_out);
  parameters.flow_control = 1;
  parameters.retry_count = static_cast<std::uint8_t>(config.retries);
  parameters.rnr_retry_count = receiver_not_ready_retries;
  parameters.srq = 1;
  parameters.qp_num = pair.address().number;
  return api_.connect(id_, &parameters) == 0 ? Status() : failed("rdma_connect");
}

Status CmId::establish() { return api_.establish(id_) == 0 ? Status() : failed("rdma_establish"); }

Status CmId::listen() {
  // All addresses: a device's own are known only as long as nobody changes them.
  SocketAddress six(RawGid{}, 0);
  sockaddr_in four{};
  four.sin_family = AF_INET;
  if (api_.bind_addr(id_, six.get()) != 0 && api_.bind_addr(id_, reinterpret_cast<sockaddr*>(&four)) != 0)
    return failed("rdma_bind_addr");
  return api_.listen(id_, backlog) == 0 ? Status() : failed("rdma_listen");
}

std::uint16_t CmId::port() const { return ntohs(api_.get_src_port(id_)); }

Status CmId::accept(const QueuePair& pair, std::uint32_t reads_served, std::span<const std::byte> data) {
  rdma_conn_param parameters{};
  give_data(parameters, data);
  parameters.responder_resources = static_cast<std::uint8_t>(reads_served);
  parameters.flow_control = 1;
  parameters.rnr_retry_count = receiver_not_ready_retries;
  parameters.srq = 1;
  parameters.qp_num = pair.address().number;
  return api_.accept(id_, &parameters) == 0 ? Status() : failed("rdma_accept");
}

void CmId::reject(std::span<const std::byte> data) noexcept {
  // A peer that does not hear of it gives up by itself.
  api_.reject(id_, data.data(), static_cast<std::uint8_t>(data.size()));
}

Status CmId::complete(PairRoute& route) const {
  ibv_qp_attr receive{};
  ibv_qp_attr send{};
  int mask = 0;
  receive.qp_state = IBV_QPS_RTR;
  send.qp_state = IBV_QPS_RTS;
  if (api_.init_qp_attr(id_, &receive, &mask) != 0 || api_.init_qp_attr(id_, &send, &mask) != 0)
    return failed("rdma_init_qp_attr");
  route.peer = {receive.dest_qp_num, receive.rq_psn};
  route.resolved = ResolvedWay{receive.ah_attr, send.sq_psn};
  return {};
}

// ---------------------------------------------------------------- CmEvents

Result<std::unique_ptr<CmEvents>> CmEvents::create(const Device& device, CmListener& listener) {
  std::unique_ptr<CmEvents> made(new CmEvents(device.context->api().cm(), listener));
  if (Status status = made->start(); !status) return status;
  return made;
}

Status CmEvents::start() {
  channel_ = api_.create_event_channel();
  if (channel_ == nullptr)
    return {Errc::unsupported,
            fmt::format("verbs: verbs.connect is rdmacm, but librdmacm can not be used: {}: is the kernel module "
                        "rdma_ucm loaded, and /dev/infiniband/rdma_cm given to this container?",
                        std::strerror(errno))};
  const int flags = ::fcntl(channel_->fd, F_GETFL);
  if (flags < 0 || ::fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) != 0)
    return {Errc::resource_exhausted, fmt::format("verbs: fcntl: {}", std::strerror(errno))};
  auto id = new_id(listener_, 0);
  if (!id) return id.status();
  listening_ = std::move(*id);
  return listening_->listen();
}

CmEvents::~CmEvents() {
  listening_.reset();
  if (channel_ != nullptr) api_.destroy_event_channel(channel_);
}

bool CmEvents::poll() {
  rdma_cm_event* event = nullptr;
  int count = 0;
  while (count < events_per_poll && api_.get_cm_event(channel_, &event) == 0) {
    hand_over(*event);
    ++count;
  }
  return count > 0;
}

// The event goes back first: its owner may destroy the id, which waits for all that is not acknowledged.
void CmEvents::hand_over(rdma_cm_event& event) {
  CmEvent copy;
  copy.type = event.event;
  copy.status = event.status;
  if (event.param.conn.private_data != nullptr) {
    copy.bytes = std::min<std::size_t>(event.param.conn.private_data_len, copy.data.size());
    std::memcpy(copy.data.data(), event.param.conn.private_data, copy.bytes);
  }
  rdma_cm_id* id = event.id;
  api_.ack_cm_event(&event);
  if (copy.type == RDMA_CM_EVENT_CONNECT_REQUEST)
    return listener_.on_cm_request(std::make_unique<CmId>(api_, id, listener_), copy);
  CmId& known = *static_cast<CmId*>(id->context);
  known.owner().on_cm_event(known, copy);
}

// ---------------------------------------------------------------- what events mean

bool ends_connection(rdma_cm_event_type type) noexcept {
  switch (type) {
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_DISCONNECTED:
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return true;
    default:
      return false;
  }
}

namespace {

Status describe_rejection(const CmEvent& event, const std::string& peer) {
  switch (event.status) {
    case refused_by_user:
      return decode_refusal(event.private_data());
    case nobody_listens:
      return {Errc::unreachable,
              fmt::format("verbs: nobody listens at {} through librdmacm: has the peer ended?", peer)};
    case stale_connection:
      return {
          Errc::channel_error,
          fmt::format("verbs: {} still holds an earlier connection of the same queue pair: it ends in a moment", peer)};
    default:
      return {Errc::unreachable,
              fmt::format("verbs: {} rejects the connection (librdmacm: reason {})", peer, event.status)};
  }
}

}  // namespace

Status describe_end(const CmEvent& event, const std::string& ours, const std::string& peer) {
  const char* reason = std::strerror(event.status < 0 ? -event.status : event.status);
  switch (event.type) {
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return {Errc::unreachable, fmt::format("verbs: librdmacm finds no way from {} to {} ({}): do the two addresses "
                                             "share a network, and does ping come through?",
                                             ours, peer, reason)};
    case RDMA_CM_EVENT_REJECTED:
      return describe_rejection(event, peer);
    case RDMA_CM_EVENT_DISCONNECTED:
      return {Errc::channel_error, fmt::format("verbs: {} has ended its connection to {}", peer, ours)};
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return {Errc::channel_error, fmt::format("verbs: device {} has been removed", ours)};
    default:
      return {Errc::unreachable,
              fmt::format("verbs: {} does not answer the request to connect {} through librdmacm ({})", peer, ours,
                          reason)};
  }
}

}  // namespace kvferry::verbs
