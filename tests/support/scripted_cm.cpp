#include "tests/support/scripted_cm.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace kvferry::test {

// ---------------------------------------------------------------- the objects behind the pointers

struct ScriptedCm::Event {
  rdma_cm_event handle{};  // first: its address is the object's
  std::vector<std::byte> data;
};

struct ScriptedCm::Channel {
  rdma_event_channel handle{};
  std::deque<std::unique_ptr<Event>> events;
};

struct ScriptedCm::Id {
  rdma_cm_id handle{};
  State state = State::idle;
  Channel* channel = nullptr;
  const CmPlace* to = nullptr;  ///< of the active side
  std::uint16_t port = 0;       ///< listened at, or called
  Id* peer = nullptr;
  std::uint32_t pair = 0;
  std::uint32_t psn = 0;
  unsigned unacknowledged = 0;
};

namespace {

template <class Object, class Handle>
Object& object(Handle* handle) {
  return *reinterpret_cast<Object*>(handle);
}

/// The address as a GID, and its port.
std::pair<ibv_gid, std::uint16_t> split(const sockaddr* address) {
  ibv_gid gid{};
  if (address->sa_family == AF_INET) {
    sockaddr_in four{};
    std::memcpy(&four, address, sizeof four);
    gid.raw[10] = gid.raw[11] = 0xff;
    std::memcpy(gid.raw + 12, &four.sin_addr, 4);
    return {gid, ntohs(four.sin_port)};
  }
  sockaddr_in6 six{};
  std::memcpy(&six, address, sizeof six);
  std::memcpy(gid.raw, &six.sin6_addr, 16);
  return {gid, ntohs(six.sin6_port)};
}

std::vector<std::byte> data_of(const void* data, std::size_t bytes, std::size_t padded) {
  std::vector<std::byte> copy(padded);
  if (bytes > 0) std::memcpy(copy.data(), data, bytes);
  return copy;
}

constexpr std::size_t call_bytes = 56;
constexpr std::size_t reply_bytes = 196;
constexpr std::size_t refusal_bytes = 148;
constexpr int nobody_listens = 8;
constexpr int refused_by_user = 28;

}  // namespace

ScriptedCm::ScriptedCm(std::vector<CmPlace> places) : places_(std::move(places)) {
  for (const CmPlace& one : places_) {
    contexts_.push_back(std::make_unique<ibv_context>());
    contexts_.back()->device = one.device;
  }
}

ScriptedCm::~ScriptedCm() = default;

// ---------------------------------------------------------------- what goes wrong

void ScriptedCm::fail_addresses(int error) {
  const std::lock_guard lock(mutex_);
  address_error_ = error;
}

void ScriptedCm::fail_routes(int error) {
  const std::lock_guard lock(mutex_);
  route_error_ = error;
}

void ScriptedCm::lose_requests(bool lost) {
  const std::lock_guard lock(mutex_);
  lost_ = lost;
}

void ScriptedCm::reject_requests(int reason) {
  const std::lock_guard lock(mutex_);
  reject_reason_ = reason;
}

void ScriptedCm::fail_accept(int error) {
  const std::lock_guard lock(mutex_);
  accept_error_ = error;
}

void ScriptedCm::remove_device(const std::string& device) {
  const std::lock_guard lock(mutex_);
  for (Id* id : ids_)
    if (id->handle.verbs != nullptr && device == id->handle.verbs->device->name) end(*id, RDMA_CM_EVENT_DEVICE_REMOVAL);
}

ScriptedCm::Counts ScriptedCm::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::vector<std::string> ScriptedCm::broken_rules() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

int ScriptedCm::wrong_state(const char* call) {
  breaks(std::string(call) + " in a state where it is not allowed");
  errno = EINVAL;
  return -1;
}

// ---------------------------------------------------------------- events

rdma_event_channel* ScriptedCm::create_event_channel() {
  const std::lock_guard lock(mutex_);
  auto* channel = new Channel;
  channel->handle.fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  ++counts_.channels;
  return &channel->handle;
}

void ScriptedCm::destroy_event_channel(rdma_event_channel* handle) {
  const std::lock_guard lock(mutex_);
  auto* channel = &object<Channel>(handle);
  // Requests that nobody has looked at have no id yet, as far as their user knows.
  for (const auto& event : channel->events)
    if (event->handle.event == RDMA_CM_EVENT_CONNECT_REQUEST) forget(object<Id>(event->handle.id));
  for (const Id* id : ids_)
    if (id->channel == channel) breaks("an event channel was destroyed before its ids");
  ::close(channel->handle.fd);
  --counts_.channels;
  delete channel;
}

void ScriptedCm::tell(Id& id, rdma_cm_event_type type, int status, const std::vector<std::byte>& data) {
  auto event = std::make_unique<Event>();
  event->handle.id = &id.handle;
  event->handle.event = type;
  event->handle.status = status;
  event->data = data;
  if (!data.empty()) {
    event->handle.param.conn.private_data = event->data.data();
    event->handle.param.conn.private_data_len = static_cast<std::uint8_t>(event->data.size());
  }
  id.channel->events.push_back(std::move(event));
  ::eventfd_write(id.channel->handle.fd, 1);
}

void ScriptedCm::end(Id& id, rdma_cm_event_type type, int status, const std::vector<std::byte>& data) {
  if (id.peer != nullptr) id.peer->peer = nullptr;
  id.peer = nullptr;
  id.state = State::over;
  tell(id, type, status, data);
}

int ScriptedCm::get_cm_event(rdma_event_channel* handle, rdma_cm_event** event) {
  const std::lock_guard lock(mutex_);
  auto& channel = object<Channel>(handle);
  if (channel.events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  eventfd_t value = 0;
  ::eventfd_read(channel.handle.fd, &value);
  Event* first = channel.events.front().release();
  channel.events.pop_front();
  ++object<Id>(first->handle.id).unacknowledged;
  *event = &first->handle;
  return 0;
}

int ScriptedCm::ack_cm_event(rdma_cm_event* handle) {
  const std::lock_guard lock(mutex_);
  auto* event = &object<Event>(handle);
  --object<Id>(event->handle.id).unacknowledged;
  delete event;
  return 0;
}

// ---------------------------------------------------------------- ids

int ScriptedCm::create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context) {
  const std::lock_guard lock(mutex_);
  auto* made = new Id;
  made->channel = &object<Channel>(channel);
  made->handle.channel = channel;
  made->handle.context = context;
  ids_.insert(made);
  ++counts_.ids;
  *id = &made->handle;
  return 0;
}

int ScriptedCm::destroy_id(rdma_cm_id* handle) {
  const std::lock_guard lock(mutex_);
  auto* id = &object<Id>(handle);
  if (id->unacknowledged > 0)
    breaks("an id was destroyed with an event that was not acknowledged: it would wait for ever");
  auto& events = id->channel->events;
  const auto gone =
      std::remove_if(events.begin(), events.end(), [&](const auto& event) { return event->handle.id == handle; });
  for (auto at = gone; at != events.end(); ++at) {
    eventfd_t value = 0;
    ::eventfd_read(id->channel->handle.fd, &value);
  }
  events.erase(gone, events.end());
  forget(*id);
  return 0;
}

void ScriptedCm::forget(Id& id) {
  if (id.peer != nullptr)
    end(*id.peer, id.peer->state == State::calling ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_DISCONNECTED);
  ids_.erase(&id);
  --counts_.ids;
  delete &id;
}

int ScriptedCm::set_option(rdma_cm_id*, int, int, void*, std::size_t) { return 0; }

void ScriptedCm::place(Id& id, const CmPlace& at) {
  id.handle.verbs = contexts_[static_cast<std::size_t>(&at - places_.data())].get();
  id.handle.port_num = at.port;
}

const CmPlace* ScriptedCm::find_place(const sockaddr* address) const {
  const ibv_gid wanted = split(address).first;
  for (const CmPlace& one : places_)
    for (const ibv_gid& known : one.addresses)
      if (std::memcmp(known.raw, wanted.raw, sizeof wanted.raw) == 0) return &one;
  return nullptr;
}

// ---------------------------------------------------------------- passive side

int ScriptedCm::bind_addr(rdma_cm_id* handle, sockaddr* /*address*/) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state != State::idle) return wrong_state("bind_addr");
  id.state = State::bound;
  id.port = next_port_++;
  return 0;
}

int ScriptedCm::listen(rdma_cm_id* handle, int /*backlog*/) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state != State::bound) return wrong_state("listen");
  id.state = State::listening;
  return 0;
}

std::uint16_t ScriptedCm::get_src_port(rdma_cm_id* handle) {
  const std::lock_guard lock(mutex_);
  return htons(object<Id>(handle).port);
}

int ScriptedCm::accept(rdma_cm_id* handle, rdma_conn_param* parameters) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state != State::called && id.state != State::over) return wrong_state("accept");
  if (parameters->private_data_len > reply_bytes || id.state == State::over) {
    errno = EINVAL;
    return -1;
  }
  if (const int error = std::exchange(accept_error_, 0); error != 0) {
    errno = error;
    return -1;
  }
  id.state = State::answered;
  id.pair = parameters->qp_num;
  tell(*id.peer, RDMA_CM_EVENT_CONNECT_RESPONSE, 0,
       data_of(parameters->private_data, parameters->private_data_len, reply_bytes));
  return 0;
}

int ScriptedCm::reject(rdma_cm_id* handle, const void* data, std::uint8_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state == State::over) return 0;
  if (id.state != State::called || bytes > refusal_bytes) return wrong_state("reject");
  Id& peer = *id.peer;
  id.peer = nullptr;
  id.state = State::over;
  end(peer, RDMA_CM_EVENT_REJECTED, refused_by_user, data_of(data, bytes, refusal_bytes));
  return 0;
}

// ---------------------------------------------------------------- active side

int ScriptedCm::resolve_addr(rdma_cm_id* handle, sockaddr* from, sockaddr* to, int timeout_ms) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state != State::idle || timeout_ms <= 0) return wrong_state("resolve_addr");
  const CmPlace* ours = find_place(from);
  id.to = find_place(to);
  id.port = split(to).second;
  if (address_error_ != 0 || ours == nullptr || id.to == nullptr) {
    tell(id, RDMA_CM_EVENT_ADDR_ERROR, address_error_ != 0 ? -address_error_ : -EHOSTUNREACH);
    return 0;
  }
  place(id, *ours);
  id.state = State::addressed;
  tell(id, RDMA_CM_EVENT_ADDR_RESOLVED);
  return 0;
}

int ScriptedCm::resolve_route(rdma_cm_id* handle, int timeout_ms) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state != State::addressed || timeout_ms <= 0) return wrong_state("resolve_route");
  if (route_error_ != 0) {
    tell(id, RDMA_CM_EVENT_ROUTE_ERROR, -route_error_);
    return 0;
  }
  id.state = State::routed;
  tell(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
  return 0;
}

int ScriptedCm::connect(rdma_cm_id* handle, rdma_conn_param* parameters) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state != State::routed || parameters->private_data_len > call_bytes) return wrong_state("connect");
  id.state = State::calling;
  id.pair = parameters->qp_num;
  id.psn = next_psn_ += 13;
  if (lost_) return 0;
  if (reject_reason_ != 0) {
    end(id, RDMA_CM_EVENT_REJECTED, reject_reason_);
    return 0;
  }
  const auto listener = std::find_if(
      ids_.begin(), ids_.end(), [&](const Id* one) { return one->state == State::listening && one->port == id.port; });
  if (listener == ids_.end()) {
    end(id, RDMA_CM_EVENT_REJECTED, nobody_listens);
    return 0;
  }
  auto* called = new Id;
  called->channel = (*listener)->channel;
  called->handle.channel = (*listener)->handle.channel;
  called->handle.context = (*listener)->handle.context;
  called->state = State::called;
  called->psn = id.psn;
  called->peer = &id;
  id.peer = called;
  place(*called, *id.to);
  ids_.insert(called);
  ++counts_.ids;
  tell(*called, RDMA_CM_EVENT_CONNECT_REQUEST, 0,
       data_of(parameters->private_data, parameters->private_data_len, call_bytes));
  return 0;
}

int ScriptedCm::establish(rdma_cm_id* handle) {
  const std::lock_guard lock(mutex_);
  auto& id = object<Id>(handle);
  if (id.state == State::over) {
    errno = EINVAL;
    return -1;
  }
  if (id.state != State::calling || id.peer == nullptr || id.peer->state != State::answered)
    return wrong_state("establish");
  id.state = id.peer->state = State::connected;
  ++counts_.connected;
  tell(*id.peer, RDMA_CM_EVENT_ESTABLISHED);
  return 0;
}

int ScriptedCm::init_qp_attr(rdma_cm_id* handle, ibv_qp_attr* attributes, int* mask) {
  const std::lock_guard lock(mutex_);
  const auto& id = object<Id>(handle);
  if (id.peer == nullptr) {
    errno = EINVAL;
    return -1;
  }
  const ibv_qp_state state = attributes->qp_state;
  *attributes = {};
  attributes->qp_state = state;
  *mask = IBV_QP_STATE;
  if (state == IBV_QPS_RTR) {
    attributes->dest_qp_num = id.peer->pair;
    attributes->rq_psn = id.psn;
    attributes->ah_attr.is_global = 1;
    attributes->ah_attr.port_num = id.handle.port_num;
  } else {
    attributes->sq_psn = id.psn;
  }
  return 0;
}

}  // namespace kvferry::test
