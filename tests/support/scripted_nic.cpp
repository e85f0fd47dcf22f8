#include "tests/support/scripted_nic.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace kvferry::test {

// ---------------------------------------------------------------- the objects behind the pointers

struct ScriptedNic::Device {
  std::size_t index = 0;
  NicDevice facts;
  ibv_device handle{};
  std::uint64_t registered = 0;
  std::uint64_t requests = 0;
  bool lost = false;
};

struct ScriptedNic::Context {
  ibv_context handle{};  // first: its address is the object's
  Device* device = nullptr;
  std::deque<ibv_async_event> events;
};

struct ScriptedNic::Region {
  ibv_mr handle{};
  unsigned access = 0;
  bool forgotten = false;
};

struct ScriptedNic::Events {
  ibv_comp_channel handle{};
  std::deque<ibv_cq*> queues;
};

/// A completion of a request that ended as it was posted.
struct AtOnce {
  ibv_wc completion{};
  std::uint64_t place = 0;
};

struct ScriptedNic::Queue {
  ibv_cq handle{};
  Events* events = nullptr;
  std::deque<ibv_wc> completions;
  std::vector<AtOnce> at_once;  ///< ring
  std::size_t oldest_at_once = 0;
  std::size_t count_at_once = 0;
  std::size_t entries = 0;
  bool armed = false;
  unsigned unacknowledged = 0;
};

struct ScriptedNic::Receives {
  ibv_srq handle{};
  struct Buffer {
    std::uint64_t id = 0;
    ibv_sge piece{};
  };
  std::deque<Buffer> buffers;
  std::size_t most = 0;
};

struct ScriptedNic::Request {
  ibv_send_wr request{};
  std::vector<ibv_sge> pieces;
  std::vector<std::byte> inlined;
  std::uint64_t number = 0;  ///< among all that were posted
  std::uint64_t place = 0;   ///< in its queue pair
};

struct ScriptedNic::Pair {
  ibv_qp handle{};
  Device* device = nullptr;
  Queue* sends = nullptr;
  Queue* arrivals = nullptr;
  Receives* receives = nullptr;
  std::uint32_t depth = 0;
  std::uint32_t max_pieces = 0;
  std::uint32_t max_inline = 0;
  bool signal_all = false;
  std::uint8_t port = 1;
  std::uint32_t peer = 0;
  std::uint32_t expected_psn = 0;
  std::uint32_t psn = 0;
  ibv_mtu mtu = IBV_MTU_256;
  unsigned access = 0;
  std::uint8_t reads_out = 0;
  std::deque<Request> queue;
  std::uint64_t posted = 0;
  std::uint64_t freed = 0;                       ///< places of the queue that completions have freed
  std::map<std::uint64_t, std::uint64_t> frees;  ///< completion's serial → requests it frees
};

namespace {

constexpr int first_dmabuf = 1'000'000;

template <class Object, class Handle>
Object& object(Handle* handle) {
  return *reinterpret_cast<Object*>(handle);
}

}  // namespace

ibv_gid_entry loopback_gid(std::uint32_t index) {
  ibv_gid_entry entry{};
  entry.gid_index = index;
  entry.port_num = 1;
  entry.gid_type = IBV_GID_TYPE_ROCE_V2;
  const std::uint8_t raw[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};
  std::memcpy(entry.gid.raw, raw, sizeof raw);
  return entry;
}

ScriptedNic::ScriptedNic(std::vector<NicDevice> devices) {
  for (NicDevice& facts : devices) {
    auto device = std::make_unique<Device>();
    device->facts = std::move(facts);
    device->index = devices_.size();
    for (NicPort& port : device->facts.ports)
      if (port.gids.empty()) port.gids.push_back(loopback_gid());
    devices_.push_back(std::move(device));
  }
  std::vector<CmPlace> places;
  for (const auto& device : devices_) {
    std::strncpy(device->handle.name, device->facts.name.c_str(), sizeof device->handle.name - 1);
    for (std::size_t i = 0; i < device->facts.ports.size(); ++i) {
      CmPlace place{&device->handle, static_cast<std::uint8_t>(i + 1), {}};
      for (const ibv_gid_entry& entry : device->facts.ports[i].gids) place.addresses.push_back(entry.gid);
      places.push_back(std::move(place));
    }
  }
  cm_ = std::make_unique<ScriptedCm>(std::move(places));
}

ScriptedNic::~ScriptedNic() = default;

// ---------------------------------------------------------------- what goes wrong

void ScriptedNic::refuse_post(std::uint64_t nth, int error) {
  const std::lock_guard lock(mutex_);
  refusals_[posted_ + nth] = error;
}

void ScriptedNic::refuse_all_posts(int error) {
  const std::lock_guard lock(mutex_);
  refuse_all_ = error;
}

void ScriptedNic::fail_request(std::uint64_t nth, ibv_wc_status status) {
  const std::lock_guard lock(mutex_);
  failures_[posted_ + nth] = status;
}

void ScriptedNic::hold_requests(bool held) {
  const std::lock_guard lock(mutex_);
  held_ = held;
}

void ScriptedNic::hang(bool hung) {
  const std::lock_guard lock(mutex_);
  hung_ = hung;
}

void ScriptedNic::forget_remote_keys() {
  const std::lock_guard lock(mutex_);
  for (auto& [key, region] : regions_)
    if ((region->access & (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)) != 0) region->forgotten = true;
}

ScriptedNic::Counts ScriptedNic::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::uint64_t ScriptedNic::requests_of(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t requests = 0;
  for (const auto& device : devices_)
    if (device->facts.name == name) requests += device->requests;
  return requests;
}

std::vector<std::string> ScriptedNic::broken_rules() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

void ScriptedNic::breaks(std::string rule) { broken_.push_back(std::move(rule)); }

// ---------------------------------------------------------------- time

void ScriptedNic::keep_time(const NicSpeed& speed) {
  const std::lock_guard lock(mutex_);
  timer_ = std::make_unique<NicTimer>(speed, devices_.size());
  epoch_ = Clock::now();
}

void ScriptedNic::advance(std::chrono::nanoseconds by) {
  const std::lock_guard lock(mutex_);
  timer_->advance(static_cast<std::uint64_t>(by.count()) * 1000);
}

TimePoint ScriptedNic::now() const {
  if (!timer_) return Clock::now();
  return epoch_ + std::chrono::nanoseconds(timer_->now() / 1000);
}

void ScriptedNic::note_time(const Pair& pair, const ibv_send_wr& request) {
  std::uint64_t bytes = 0;
  for (int i = 0; i < request.num_sge; ++i) bytes += request.sg_list[i].length;
  const auto peer = pairs_.find(pair.peer);
  timer_->post(pair.handle.qp_num, pair.device->index,
               peer == pairs_.end() ? pair.device->index : peer->second->device->index, bytes,
               request.opcode == IBV_WR_RDMA_READ, pair.reads_out);
}

/// Whether the pair's oldest request has had the time that it takes, or has been given up.
bool ScriptedNic::has_come_back(const Pair& pair) {
  if (!timer_) return true;
  if (peer_of(pair) == nullptr) return timer_->gives_up(pair.handle.qp_num);
  return timer_->front_is_due(pair.handle.qp_num);
}

// ---------------------------------------------------------------- devices

ibv_device** ScriptedNic::get_device_list(int* count) {
  const std::lock_guard lock(mutex_);
  auto** list = new ibv_device*[devices_.size() + 1]();
  for (std::size_t i = 0; i < devices_.size(); ++i) list[i] = &devices_[i]->handle;
  *count = static_cast<int>(devices_.size());
  errno = 0;
  return list;
}

void ScriptedNic::free_device_list(ibv_device** list) { delete[] list; }

const char* ScriptedNic::get_device_name(ibv_device* handle) {
  for (const auto& device : devices_)
    if (&device->handle == handle) return device->facts.name.c_str();
  return "";
}

ibv_context* ScriptedNic::open_device(ibv_device* handle) {
  const std::lock_guard lock(mutex_);
  for (const auto& device : devices_) {
    if (&device->handle != handle) continue;
    auto* context = new Context;
    context->device = device.get();
    context->handle.device = handle;
    context->handle.async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    contexts_.insert(context);
    ++counts_.contexts;
    return &context->handle;
  }
  errno = ENODEV;
  return nullptr;
}

int ScriptedNic::close_device(ibv_context* handle) {
  const std::lock_guard lock(mutex_);
  auto* context = &object<Context>(handle);
  contexts_.erase(context);
  ::close(context->handle.async_fd);
  --counts_.contexts;
  delete context;
  return 0;
}

int ScriptedNic::query_device(ibv_context* handle, ibv_device_attr* attributes) {
  const NicDevice& facts = object<Context>(handle).device->facts;
  *attributes = {};
  attributes->phys_port_cnt = static_cast<std::uint8_t>(facts.ports.size());
  attributes->max_qp_wr = facts.max_qp_wr;
  attributes->max_sge = facts.max_sge;
  attributes->max_cqe = facts.max_cqe;
  attributes->max_srq_wr = facts.max_srq_wr;
  attributes->max_qp_rd_atom = facts.max_reads;
  attributes->max_qp_init_rd_atom = facts.max_reads;
  attributes->max_mr_size = facts.max_mr_bytes;
  attributes->max_qp = 100000;
  return 0;
}

int ScriptedNic::query_port(ibv_context* handle, std::uint8_t port, ibv_port_attr* attributes) {
  const std::lock_guard lock(mutex_);
  const NicDevice& facts = object<Context>(handle).device->facts;
  if (port == 0 || port > facts.ports.size()) return EINVAL;
  const NicPort& of = facts.ports[port - 1u];
  *attributes = {};
  attributes->state = of.state;
  attributes->link_layer = of.ethernet ? IBV_LINK_LAYER_ETHERNET : IBV_LINK_LAYER_INFINIBAND;
  attributes->active_mtu = of.mtu;
  attributes->max_mtu = IBV_MTU_4096;
  attributes->lid = of.lid;
  attributes->max_msg_sz = of.max_message;
  attributes->active_width = 2;
  attributes->active_speed = 128;
  for (const ibv_gid_entry& entry : of.gids)
    attributes->gid_tbl_len = std::max<int>(attributes->gid_tbl_len, static_cast<int>(entry.gid_index) + 1);
  return 0;
}

int ScriptedNic::query_gid_ex(ibv_context* handle, std::uint32_t port, std::uint32_t index, ibv_gid_entry* entry) {
  const NicDevice& facts = object<Context>(handle).device->facts;
  for (const ibv_gid_entry& one : facts.ports.at(port - 1u).gids) {
    if (one.gid_index != index) continue;
    *entry = one;
    return 0;
  }
  return ENODATA;
}

void ScriptedNic::set_port(const std::string& device, std::uint8_t port, ibv_port_state state) {
  const std::lock_guard lock(mutex_);
  for (Context* context : contexts_) {
    if (context->device->facts.name != device) continue;
    ibv_async_event event{};
    event.event_type = state == IBV_PORT_ACTIVE ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR;
    event.element.port_num = port;
    context->events.push_back(event);
    ::eventfd_write(context->handle.async_fd, 1);
  }
  for (const auto& one : devices_)
    if (one->facts.name == device) one->facts.ports.at(port - 1u).state = state;
}

void ScriptedNic::lose_device(const std::string& device) {
  const std::lock_guard lock(mutex_);
  for (const auto& one : devices_)
    if (one->facts.name == device) one->lost = true;
  for (Context* context : contexts_) {
    if (context->device->facts.name != device) continue;
    ibv_async_event event{};
    event.event_type = IBV_EVENT_DEVICE_FATAL;
    context->events.push_back(event);
    ::eventfd_write(context->handle.async_fd, 1);
  }
}

int ScriptedNic::get_async_event(ibv_context* handle, ibv_async_event* event) {
  const std::lock_guard lock(mutex_);
  auto& context = object<Context>(handle);
  if (context.events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  eventfd_t value = 0;
  ::eventfd_read(context.handle.async_fd, &value);
  *event = context.events.front();
  context.events.pop_front();
  return 0;
}

void ScriptedNic::ack_async_event(ibv_async_event* /*event*/) {}

// ---------------------------------------------------------------- memory

ibv_pd* ScriptedNic::alloc_pd(ibv_context* context) {
  const std::lock_guard lock(mutex_);
  ++counts_.domains;
  return new ibv_pd{context, 0};
}

int ScriptedNic::dealloc_pd(ibv_pd* domain) {
  const std::lock_guard lock(mutex_);
  --counts_.domains;
  delete domain;
  return 0;
}

ibv_mr* ScriptedNic::reg_mr(ibv_pd* domain, void* data, std::size_t bytes, unsigned access) {
  const std::lock_guard lock(mutex_);
  Device& device = *object<Context>(domain->context).device;
  if (bytes > device.facts.max_mr_bytes) {
    errno = EINVAL;
    return nullptr;
  }
  if (bytes > device.facts.memlock_bytes - std::min(device.registered, device.facts.memlock_bytes)) {
    errno = ENOMEM;
    return nullptr;
  }
  const auto* begin = static_cast<std::byte*>(data);
  for (const auto& [memory, size] : gpu_memory_)
    if (begin < memory + size && memory < begin + bytes && !device.facts.peermem) {
      errno = EFAULT;
      return nullptr;
    }
  return add_region(domain, data, bytes, access);
}

ibv_mr* ScriptedNic::add_region(ibv_pd* domain, void* data, std::size_t bytes, unsigned access) {
  object<Context>(domain->context).device->registered += bytes;
  auto* region = new Region;
  region->handle.context = domain->context;
  region->handle.pd = domain;
  region->handle.addr = data;
  region->handle.length = bytes;
  region->handle.lkey = region->handle.rkey = next_key_++;
  region->access = access;
  regions_[region->handle.lkey] = region;
  ++counts_.regions;
  return &region->handle;
}

int ScriptedNic::add_gpu_memory(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  gpu_memory_.emplace_back(static_cast<std::byte*>(data), bytes);
  return first_dmabuf + static_cast<int>(gpu_memory_.size() - 1);
}

ibv_mr* ScriptedNic::reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address,
                                   int fd, int access) {
  const std::lock_guard lock(mutex_);
  const auto handle = static_cast<std::size_t>(fd - first_dmabuf);
  if (!object<Context>(domain->context).device->facts.dmabuf)
    errno = EOPNOTSUPP;
  else if (fd < first_dmabuf || handle >= gpu_memory_.size())
    errno = EBADF;
  else if (offset > gpu_memory_[handle].second || bytes > gpu_memory_[handle].second - offset ||
           reinterpret_cast<std::uintptr_t>(gpu_memory_[handle].first) + offset != address)
    // Devices could give the memory another address; kvferry asks for its own.
    errno = EINVAL;
  else
    return add_region(domain, gpu_memory_[handle].first + offset, bytes, static_cast<unsigned>(access));
  return nullptr;
}

int ScriptedNic::dereg_mr(ibv_mr* handle) {
  const std::lock_guard lock(mutex_);
  auto* region = &object<Region>(handle);
  object<Context>(handle->context).device->registered -= handle->length;
  regions_.erase(handle->lkey);
  --counts_.regions;
  delete region;
  return 0;
}

const ScriptedNic::Region* ScriptedNic::find_region(const ibv_pd* domain, std::uint32_t key) const {
  const auto found = regions_.find(key);
  return found == regions_.end() || found->second->handle.pd != domain ? nullptr : found->second;
}

// ---------------------------------------------------------------- completion queues

ibv_comp_channel* ScriptedNic::create_comp_channel(ibv_context* context) {
  const std::lock_guard lock(mutex_);
  auto* events = new Events;
  events->handle.context = context;
  events->handle.fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  ++counts_.channels;
  return &events->handle;
}

int ScriptedNic::destroy_comp_channel(ibv_comp_channel* handle) {
  const std::lock_guard lock(mutex_);
  auto* events = &object<Events>(handle);
  ::close(events->handle.fd);
  --counts_.channels;
  delete events;
  return 0;
}

ibv_cq* ScriptedNic::create_cq(ibv_context* context, int entries, ibv_comp_channel* channel) {
  const std::lock_guard lock(mutex_);
  auto* queue = new Queue;
  queue->handle.context = context;
  queue->handle.cqe = entries;
  queue->entries = static_cast<std::size_t>(entries);
  queue->events = channel != nullptr ? &object<Events>(channel) : nullptr;
  ++counts_.queues;
  return &queue->handle;
}

int ScriptedNic::destroy_cq(ibv_cq* handle) {
  const std::lock_guard lock(mutex_);
  auto* queue = &object<Queue>(handle);
  for (const auto& [number, pair] : pairs_)
    if (pair->sends == queue || pair->arrivals == queue) breaks("a completion queue was destroyed before its pairs");
  if (queue->unacknowledged > 0) breaks("a completion queue was destroyed with events that were not acknowledged");
  --counts_.queues;
  delete queue;
  return 0;
}

void ScriptedNic::complete(Queue& queue, const ibv_wc& completion) {
  if (queue.completions.size() >= queue.entries) breaks("a completion queue overflowed");
  queue.completions.push_back(completion);
  if (!queue.armed || queue.events == nullptr) return;
  queue.armed = false;
  queue.events->queues.push_back(&queue.handle);
  ::eventfd_write(queue.events->handle.fd, 1);
}

int ScriptedNic::poll_cq(ibv_cq* handle, int most, ibv_wc* completions) {
  const std::lock_guard lock(mutex_);
  auto& queue = object<Queue>(handle);
  if (object<Context>(handle->context).device->lost) return -1;
  run();
  int count = 0;
  while (count < most && queue.count_at_once > 0) {
    const AtOnce& one = queue.at_once[queue.oldest_at_once];
    completions[count++] = one.completion;
    const auto pair = pairs_.find(one.completion.qp_num);
    if (pair != pairs_.end()) pair->second->freed = std::max(pair->second->freed, one.place);
    queue.oldest_at_once = (queue.oldest_at_once + 1) % queue.at_once.size();
    --queue.count_at_once;
  }
  while (count < most && !queue.completions.empty()) {
    completions[count] = queue.completions.front();
    queue.completions.pop_front();
    ibv_wc& one = completions[count++];
    const auto pair = pairs_.find(one.qp_num);
    if (pair == pairs_.end() || (one.opcode & IBV_WC_RECV) != 0) continue;
    pair->second->freed = std::max<std::uint64_t>(pair->second->freed, pair->second->frees[one.wr_id]);
    pair->second->frees.erase(one.wr_id);
  }
  return count;
}

int ScriptedNic::req_notify_cq(ibv_cq* handle) {
  const std::lock_guard lock(mutex_);
  object<Queue>(handle).armed = true;
  return 0;
}

int ScriptedNic::get_cq_event(ibv_comp_channel* handle, ibv_cq** queue) {
  const std::lock_guard lock(mutex_);
  auto& events = object<Events>(handle);
  if (events.queues.empty()) {
    errno = EAGAIN;
    return -1;
  }
  eventfd_t value = 0;
  ::eventfd_read(events.handle.fd, &value);
  *queue = events.queues.front();
  events.queues.pop_front();
  ++object<Queue>(*queue).unacknowledged;
  return 0;
}

void ScriptedNic::ack_cq_events(ibv_cq* handle, unsigned count) {
  const std::lock_guard lock(mutex_);
  auto& queue = object<Queue>(handle);
  if (count > queue.unacknowledged) breaks("more events were acknowledged than came");
  queue.unacknowledged -= std::min(count, queue.unacknowledged);
}

// ---------------------------------------------------------------- receives

ibv_srq* ScriptedNic::create_srq(ibv_pd* domain, ibv_srq_init_attr* attributes) {
  const std::lock_guard lock(mutex_);
  auto* receives = new Receives;
  receives->handle.context = domain->context;
  receives->handle.pd = domain;
  receives->most = attributes->attr.max_wr;
  ++counts_.receive_queues;
  return &receives->handle;
}

int ScriptedNic::destroy_srq(ibv_srq* handle) {
  const std::lock_guard lock(mutex_);
  --counts_.receive_queues;
  delete &object<Receives>(handle);
  return 0;
}

int ScriptedNic::post_srq_recv(ibv_srq* handle, ibv_recv_wr* request, ibv_recv_wr** bad) {
  const std::lock_guard lock(mutex_);
  auto& receives = object<Receives>(handle);
  for (; request != nullptr; request = request->next) {
    if (receives.buffers.size() >= receives.most) {
      breaks("a shared receive queue overflowed");
      *bad = request;
      return ENOMEM;
    }
    receives.buffers.push_back({request->wr_id, request->sg_list[0]});
  }
  return 0;
}

// ---------------------------------------------------------------- queue pairs

ibv_qp* ScriptedNic::create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  const std::lock_guard lock(mutex_);
  Device& device = *object<Context>(domain->context).device;
  const NicDevice& facts = device.facts;
  if (attributes->cap.max_send_wr > static_cast<std::uint32_t>(facts.max_qp_wr) ||
      attributes->cap.max_send_sge > static_cast<std::uint32_t>(facts.max_sge) ||
      attributes->cap.max_inline_data > facts.max_inline) {
    errno = EINVAL;
    return nullptr;
  }
  auto* pair = new Pair;
  pair->handle.context = domain->context;
  pair->handle.pd = domain;
  pair->handle.qp_num = next_number_++;
  pair->handle.state = IBV_QPS_RESET;
  pair->handle.qp_type = attributes->qp_type;
  pair->device = &device;
  pair->sends = &object<Queue>(attributes->send_cq);
  pair->arrivals = &object<Queue>(attributes->recv_cq);
  pair->receives = attributes->srq != nullptr ? &object<Receives>(attributes->srq) : nullptr;
  pair->depth = attributes->cap.max_send_wr;
  pair->max_pieces = attributes->cap.max_send_sge;
  pair->max_inline = attributes->cap.max_inline_data;
  pair->signal_all = attributes->sq_sig_all != 0;
  pairs_[pair->handle.qp_num] = pair;
  ++counts_.pairs;
  return &pair->handle;
}

int ScriptedNic::destroy_qp(ibv_qp* handle) {
  const std::lock_guard lock(mutex_);
  auto* pair = &object<Pair>(handle);
  pairs_.erase(pair->handle.qp_num);
  if (timer_) timer_->forget(pair->handle.qp_num);
  --counts_.pairs;
  delete pair;
  return 0;
}

int ScriptedNic::modify_qp(ibv_qp* handle, ibv_qp_attr* attributes, int mask) {
  const std::lock_guard lock(mutex_);
  auto& pair = object<Pair>(handle);
  const ibv_qp_state from = pair.handle.state;
  const ibv_qp_state to = attributes->qp_state;
  const auto needs = [&](int wanted) { return (mask & wanted) == wanted; };
  if (to == IBV_QPS_ERR) {
    pair.handle.state = to;
    if (!hung_) flush(pair);
    return 0;
  }
  if (from == IBV_QPS_RESET && to == IBV_QPS_INIT) {
    if (!needs(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) return EINVAL;
    pair.port = attributes->port_num;
    pair.access = attributes->qp_access_flags;
  } else if (from == IBV_QPS_INIT && to == IBV_QPS_RTR) {
    if (!needs(IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
      return EINVAL;
    if (attributes->min_rnr_timer == 0) breaks("an RNR timer of 0 means 655 ms");
    const NicPort& port = pair.device->facts.ports[pair.port - 1u];
    if (attributes->path_mtu > port.mtu) return EINVAL;
    if (port.ethernet && attributes->ah_attr.is_global == 0) return EINVAL;
    pair.peer = attributes->dest_qp_num;
    pair.expected_psn = attributes->rq_psn;
    pair.mtu = attributes->path_mtu;
  } else if (from == IBV_QPS_RTR && to == IBV_QPS_RTS) {
    if (!needs(IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
               IBV_QP_MAX_QP_RD_ATOMIC))
      return EINVAL;
    if (attributes->timeout == 0) breaks("a timeout of 0 waits for ever");
    pair.psn = attributes->sq_psn;
    pair.reads_out = attributes->max_rd_atomic;
  } else {
    return EINVAL;
  }
  pair.handle.state = to;
  return 0;
}

std::optional<int> ScriptedNic::refusal(const Pair& pair, const ibv_send_wr& request) {
  if (refuse_all_ != 0) return refuse_all_;
  const auto scripted = refusals_.find(posted_);
  if (scripted != refusals_.end()) {
    const int error = scripted->second;
    refusals_.erase(scripted);
    return error;
  }
  if (pair.device->lost) return EIO;
  if (pair.handle.state != IBV_QPS_RTS && pair.handle.state != IBV_QPS_ERR) return EINVAL;
  if (request.num_sge > static_cast<int>(pair.max_pieces)) return EINVAL;
  if (pair.posted - pair.freed >= pair.depth) return ENOMEM;
  return std::nullopt;
}

int ScriptedNic::post_send(ibv_qp* handle, ibv_send_wr* request, ibv_send_wr** bad) {
  const std::lock_guard lock(mutex_);
  auto& pair = object<Pair>(handle);
  ++counts_.doorbells;
  if (at_once_ && pair.queue.empty() && request->opcode != IBV_WR_SEND) return post_at_once(pair, request, bad);
  for (; request != nullptr; request = request->next) {
    if (const auto error = refusal(pair, *request)) {
      *bad = request;
      return *error;
    }
    Request made;
    made.request = *request;
    made.request.next = nullptr;
    made.pieces.assign(request->sg_list, request->sg_list + request->num_sge);
    if ((request->send_flags & IBV_SEND_INLINE) != 0) {
      for (const ibv_sge& piece : made.pieces) {
        const auto* from = reinterpret_cast<const std::byte*>(piece.addr);
        made.inlined.insert(made.inlined.end(), from, from + piece.length);
      }
      if (made.inlined.size() > pair.max_inline) {
        *bad = request;
        return EINVAL;
      }
    }
    made.number = posted_++;
    made.place = ++pair.posted;
    if (timer_) note_time(pair, *request);
    ++pair.device->requests;
    ++counts_.requests;
    if ((request->send_flags & IBV_SEND_SIGNALED) != 0) ++counts_.signalled;
    pair.queue.push_back(std::move(made));
  }
  if (pair.handle.state == IBV_QPS_ERR && !hung_) flush(pair);
  return 0;
}

int ScriptedNic::post_at_once(Pair& pair, ibv_send_wr* request, ibv_send_wr** bad) {
  Queue& queue = *pair.sends;
  if (queue.at_once.empty()) queue.at_once.resize(queue.entries);
  for (; request != nullptr; request = request->next) {
    if (const auto error = refusal(pair, *request)) {
      *bad = request;
      return *error;
    }
    ++posted_;
    ++pair.posted;
    ++counts_.requests;
    if ((request->send_flags & IBV_SEND_SIGNALED) == 0) continue;
    ++counts_.signalled;
    if (queue.count_at_once == queue.at_once.size()) breaks("a completion queue overflowed");
    AtOnce& one = queue.at_once[(queue.oldest_at_once + queue.count_at_once++) % queue.at_once.size()];
    one.place = pair.posted;
    one.completion = {};
    one.completion.wr_id = request->wr_id;
    one.completion.qp_num = pair.handle.qp_num;
  }
  return 0;
}

// ---------------------------------------------------------------- moving

void ScriptedNic::run() {
  if (held_ || hung_) {
    if (!hung_)
      for (const auto& [number, pair] : pairs_)
        if (pair->handle.state == IBV_QPS_ERR) flush(*pair);
    return;
  }
  for (const auto& [number, pair] : pairs_) {
    if (pair->handle.state == IBV_QPS_ERR) flush(*pair);
    while (pair->handle.state == IBV_QPS_RTS && !pair->queue.empty() && has_come_back(*pair) && run_one(*pair)) {
    }
  }
}

bool ScriptedNic::run_one(Pair& pair) {
  Request request = pair.queue.front();
  bool wait = false;
  const ibv_wc_status status = carry_out(pair, request, wait);
  if (wait) return false;
  pair.queue.pop_front();
  if (timer_) timer_->pop(pair.handle.qp_num);
  end(pair, request, status);
  return true;
}

ibv_wc_status ScriptedNic::carry_out(Pair& pair, Request& request, bool& wait) {
  const auto scripted = failures_.find(request.number);
  if (scripted != failures_.end()) {
    const ibv_wc_status status = scripted->second;
    failures_.erase(scripted);
    return status;
  }
  const Pair* peer = peer_of(pair);
  if (peer == nullptr) return IBV_WC_RETRY_EXC_ERR;
  if (peer->mtu != pair.mtu) breaks("the two ends of a connection differ in their path MTU");
  if (request.request.opcode == IBV_WR_SEND) return deliver(*pairs_.at(pair.peer), request, wait);
  return move(pair, *peer, request);
}

/// The pair at the other end, if packets come through to it.
const ScriptedNic::Pair* ScriptedNic::peer_of(const Pair& pair) const {
  const auto found = pairs_.find(pair.peer);
  const bool linked = pair.device->facts.ports[pair.port - 1u].state == IBV_PORT_ACTIVE;
  if (!linked || found == pairs_.end()) return nullptr;
  const Pair& peer = *found->second;
  const bool answers = peer.handle.state == IBV_QPS_RTS || peer.handle.state == IBV_QPS_RTR;
  if (peer.peer != pair.handle.qp_num || !answers || peer.device->lost || peer.expected_psn != pair.psn) return nullptr;
  return peer.device->facts.ports[peer.port - 1u].state == IBV_PORT_ACTIVE ? &peer : nullptr;
}

ibv_wc_status ScriptedNic::move(const Pair& pair, const Pair& peer, Request& request) {
  const bool read = request.request.opcode == IBV_WR_RDMA_READ;
  if (read && pair.reads_out == 0) return IBV_WC_REM_INV_REQ_ERR;
  std::uint64_t total = 0;
  for (const ibv_sge& piece : request.pieces) total += piece.length;
  if (total > pair.device->facts.ports[pair.port - 1u].max_message) return IBV_WC_LOC_LEN_ERR;
  if (total == 0) return IBV_WC_SUCCESS;
  const Region* remote = find_region(peer.handle.pd, request.request.wr.rdma.rkey);
  const std::uint64_t address = request.request.wr.rdma.remote_addr;
  const unsigned need = read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  if (remote == nullptr || remote->forgotten || (remote->access & need) == 0 || (peer.access & need) == 0)
    return IBV_WC_REM_ACCESS_ERR;
  const auto begin = reinterpret_cast<std::uintptr_t>(remote->handle.addr);
  if (address < begin || address - begin > remote->handle.length || total > remote->handle.length - (address - begin))
    return IBV_WC_REM_ACCESS_ERR;
  auto* there = reinterpret_cast<std::byte*>(address);
  for (const ibv_sge& piece : request.pieces) {
    const Region* local = find_region(pair.handle.pd, piece.lkey);
    if (local == nullptr) return IBV_WC_LOC_PROT_ERR;
    const auto first = reinterpret_cast<std::uintptr_t>(local->handle.addr);
    if (piece.addr < first || piece.addr - first + piece.length > local->handle.length) return IBV_WC_LOC_PROT_ERR;
    auto* here = reinterpret_cast<std::byte*>(piece.addr);
    if (moves_) std::memcpy(read ? here : there, read ? there : here, piece.length);
    there += piece.length;
  }
  counts_.bytes += total;
  return IBV_WC_SUCCESS;
}

ibv_wc_status ScriptedNic::deliver(Pair& peer, const Request& request, bool& wait) {
  if (peer.receives == nullptr || peer.receives->buffers.empty()) {
    ++counts_.not_ready;
    wait = true;
    return IBV_WC_SUCCESS;
  }
  std::vector<std::byte> bytes = request.inlined;
  if ((request.request.send_flags & IBV_SEND_INLINE) == 0)
    for (const ibv_sge& piece : request.pieces) {
      const auto* from = reinterpret_cast<const std::byte*>(piece.addr);
      bytes.insert(bytes.end(), from, from + piece.length);
    }
  const auto buffer = peer.receives->buffers.front();
  if (bytes.size() > buffer.piece.length) return IBV_WC_REM_INV_REQ_ERR;
  peer.receives->buffers.pop_front();
  std::memcpy(reinterpret_cast<void*>(buffer.piece.addr), bytes.data(), bytes.size());
  ibv_wc arrival{};
  arrival.wr_id = buffer.id;
  arrival.status = IBV_WC_SUCCESS;
  arrival.opcode = IBV_WC_RECV;
  arrival.byte_len = static_cast<std::uint32_t>(bytes.size());
  arrival.qp_num = peer.handle.qp_num;
  complete(*peer.arrivals, arrival);
  return IBV_WC_SUCCESS;
}

void ScriptedNic::end(Pair& pair, Request& request, ibv_wc_status status) {
  const bool signalled = pair.signal_all || (request.request.send_flags & IBV_SEND_SIGNALED) != 0;
  if (status != IBV_WC_SUCCESS || signalled) {
    ibv_wc completion{};
    completion.wr_id = request.request.wr_id;
    completion.status = status;
    completion.qp_num = pair.handle.qp_num;
    pair.frees[completion.wr_id] = request.place;
    complete(*pair.sends, completion);
  }
  if (status == IBV_WC_SUCCESS || pair.handle.state == IBV_QPS_ERR) return;
  pair.handle.state = IBV_QPS_ERR;
  flush(pair);
}

void ScriptedNic::flush(Pair& pair) {
  while (!pair.queue.empty()) {
    Request request = std::move(pair.queue.front());
    pair.queue.pop_front();
    end(pair, request, IBV_WC_WR_FLUSH_ERR);
  }
}

}  // namespace kvferry::test
