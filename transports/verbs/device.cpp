#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>

#include <fcntl.h>
#include <fmt/format.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/verbs/device.hpp>

namespace kvferry::verbs {
namespace {

// ---------------------------------------------------------------- what sysfs and the port say

std::string state_text(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_ACTIVE:
      return "active";
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "initializing: no subnet manager has configured it";
    case IBV_PORT_ARMED:
      return "armed";
    default:
      return "in an unknown state";
  }
}

// Lanes by the IBTA's codes of active_width, rate per lane in Gb/s by those of active_speed.
std::uint32_t rate_of(const ibv_port_attr& port) {
  const std::uint32_t lanes = port.active_width == 1   ? 1
                              : port.active_width == 2 ? 4
                              : port.active_width == 4 ? 8
                              : port.active_width == 8 ? 12
                                                       : 2;
  switch (port.active_speed) {
    case 1:
      return lanes * 5 / 2;
    case 2:
      return lanes * 5;
    case 4:
    case 8:
      return lanes * 10;
    case 16:
      return lanes * 14;
    case 32:
      return lanes * 25;
    case 64:
      return lanes * 50;
    case 128:
      return lanes * 100;
    default:
      return 0;
  }
}

std::vector<Gid> read_gids(Api& api, ibv_context* context, std::uint8_t port, int table_size) {
  std::vector<Gid> table;
  for (int index = 0; index < table_size; ++index) {
    ibv_gid_entry entry{};
    if (api.query_gid_ex(context, port, static_cast<std::uint32_t>(index), &entry) != 0) continue;
    Gid gid;
    std::memcpy(gid.raw.data(), entry.gid.raw, gid.raw.size());
    gid.index = static_cast<std::uint32_t>(index);
    gid.type = entry.gid_type == IBV_GID_TYPE_ROCE_V2   ? GidType::roce_v2
               : entry.gid_type == IBV_GID_TYPE_ROCE_V1 ? GidType::roce_v1
                                                        : GidType::infiniband;
    table.push_back(gid);
  }
  return table;
}

PortFacts facts_of(Api& api, ibv_context* context, const std::string& device, std::uint8_t number,
                   const std::vector<InterfaceAddress>& interfaces, const Topology& topology) {
  PortFacts facts;
  facts.device = device;
  facts.port = number;
  ibv_port_attr port{};
  if (api.query_port(context, number, &port) != 0) {
    facts.state = "not answering";
    return facts;
  }
  facts.active = port.state == IBV_PORT_ACTIVE;
  facts.state = state_text(port.state);
  facts.ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  facts.gbit = rate_of(port);
  facts.mtu = 128u << port.active_mtu;
  facts.lid = port.lid;
  facts.slot = topology.slot_of_rdma_device(device);
  facts.table = read_gids(api, context, number, port.gid_tbl_len);
  facts.gids = rank_gids(facts.table, interfaces);
  return facts;
}

/// The list of devices, freed with it.
class DeviceList {
 public:
  explicit DeviceList(Api& api) : api_(api), list_(api.get_device_list(&count_)) {}
  ~DeviceList() {
    if (list_ != nullptr) api_.free_device_list(list_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;

  std::span<ibv_device*> devices() const { return {list_, static_cast<std::size_t>(list_ != nullptr ? count_ : 0)}; }

 private:
  Api& api_;
  int count_ = 0;
  ibv_device** list_;
};

// ---------------------------------------------------------------- choosing

bool names(const std::string& wanted, const PortFacts& port) { return wanted == port.device || wanted == port.name(); }

std::string list_names(const std::vector<PortFacts>& ports) {
  std::string text;
  for (const PortFacts& port : ports) text += fmt::format("{}{}", text.empty() ? "" : ", ", port.name());
  return text;
}

}  // namespace

std::string PortFacts::name() const { return fmt::format("{}:{}", device, port); }

std::string why_unusable(const PortFacts& port, const VerbsConfig& config) {
  if (!port.active) return fmt::format("its port is {}", port.state);
  if (!port.ethernet) return {};
  if (port.gids.empty())
    return "none of its GIDs belongs to an address of this host: give its network interface an address";
  if (config.gid_index >= 0 && std::none_of(port.gids.begin(), port.gids.end(), [&](const Gid& gid) {
        return gid.index == static_cast<std::uint32_t>(config.gid_index);
      }))
    return fmt::format("it has no usable GID at the index {} that is configured", config.gid_index);
  return {};
}

Result<std::vector<PortFacts>> list_ports(Api& api, const Topology& topology) {
  const DeviceList list(api);
  if (list.devices().empty())
    return {Errc::unsupported,
            fmt::format("verbs: no RDMA device here ({}): is its driver loaded, and /dev/infiniband given to this "
                        "container?",
                        std::strerror(errno != 0 ? errno : ENODEV))};
  const auto interfaces = interface_addresses();
  std::vector<PortFacts> ports;
  for (ibv_device* device : list.devices()) {
    const std::string name = api.get_device_name(device);
    ibv_context* context = api.open_device(device);
    if (context == nullptr) {
      log(LogLevel::warning, fmt::format("verbs: device {} can not be opened: {}", name, std::strerror(errno)));
      continue;
    }
    ibv_device_attr attributes{};
    if (api.query_device(context, &attributes) == 0)
      for (std::uint8_t number = 1; number <= attributes.phys_port_cnt; ++number)
        ports.push_back(facts_of(api, context, name, number, interfaces, topology));
    api.close_device(context);
  }
  return ports;
}

Result<std::vector<PortFacts>> choose_ports(std::vector<PortFacts> ports, const VerbsConfig& config) {
  for (const std::string& wanted : config.devices)
    if (std::none_of(ports.begin(), ports.end(), [&](const PortFacts& port) { return names(wanted, port); }))
      return {Errc::invalid_argument,
              fmt::format("verbs: there is no device '{}'; this host has: {}", wanted, list_names(ports))};
  std::vector<PortFacts> chosen;
  std::string reasons;
  const auto consider = [&](const PortFacts& port) {
    const std::string why = why_unusable(port, config);
    if (why.empty()) return chosen.push_back(port);
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", port.name(), why);
  };
  if (config.devices.empty()) {
    std::stable_sort(ports.begin(), ports.end(),
                     [](const PortFacts& a, const PortFacts& b) { return a.gbit > b.gbit; });
    for (const PortFacts& port : ports) consider(port);
  }
  for (const std::string& wanted : config.devices)
    for (const PortFacts& port : ports)
      if (names(wanted, port)) consider(port);
  if (chosen.empty()) return {Errc::no_path, fmt::format("verbs: no RDMA port can be used ({})", reasons)};
  if (!reasons.empty()) log(LogLevel::info, fmt::format("verbs: ports left out: {}", reasons));
  if (config.gid_index >= 0)
    for (PortFacts& port : chosen)
      std::erase_if(port.gids,
                    [&](const Gid& gid) { return gid.index != static_cast<std::uint32_t>(config.gid_index); });
  return chosen;
}

// ---------------------------------------------------------------- open devices

Result<std::shared_ptr<Context>> Context::open(Api& api, const std::string& device) {
  const DeviceList list(api);
  for (ibv_device* one : list.devices()) {
    if (device != api.get_device_name(one)) continue;
    std::shared_ptr<Context> context(new Context(api, device));
    if (Status status = context->start(one); !status) return status;
    return context;
  }
  return {Errc::no_path, fmt::format("verbs: device {} is gone", device)};
}

Status Context::start(ibv_device* device) {
  const auto failed = [this](std::string_view what) {
    return Status(Errc::resource_exhausted, fmt::format("verbs: {} of {}: {}", what, name_, std::strerror(errno)));
  };
  context_ = api_.open_device(device);
  if (context_ == nullptr) return failed("ibv_open_device");
  if (api_.query_device(context_, &limits_) != 0) return failed("ibv_query_device");
  domain_ = api_.alloc_pd(context_);
  if (domain_ == nullptr) return failed("ibv_alloc_pd");
  const int flags = ::fcntl(context_->async_fd, F_GETFL);
  if (flags < 0 || ::fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK) != 0) return failed("fcntl");
  return {};
}

Context::~Context() {
  if (domain_ != nullptr) api_.dealloc_pd(domain_);
  if (context_ != nullptr) api_.close_device(context_);
}

void Context::read_events() {
  ibv_async_event event{};
  while (api_.get_async_event(context_, &event) == 0) {
    switch (event.event_type) {
      case IBV_EVENT_DEVICE_FATAL:
        lost_.store(true, std::memory_order_release);
        log(LogLevel::error, fmt::format("verbs: device {} has failed", name_));
        break;
      case IBV_EVENT_PORT_ERR:
      case IBV_EVENT_LID_CHANGE:
      case IBV_EVENT_GID_CHANGE: {
        const auto port = static_cast<std::size_t>(event.element.port_num);
        if (port < port_losses_.size()) port_losses_[port].fetch_add(1, std::memory_order_release);
        log(LogLevel::warning, fmt::format("verbs: port {} of {} went down or changed its address", port, name_));
        break;
      }
      default:
        // What concerns one queue pair shows in its completions.
        break;
    }
    api_.ack_async_event(&event);
  }
}

Result<std::vector<Device>> open_devices(Api& api, const VerbsConfig& config, const Topology& topology) {
  auto listed = list_ports(api, topology);
  if (!listed) return listed.status();
  auto chosen = choose_ports(std::move(*listed), config);
  if (!chosen) return chosen.status();
  std::vector<Device> devices;
  for (PortFacts& facts : *chosen) {
    Device device;
    for (const Device& other : devices)
      if (other.facts.device == facts.device) device.context = other.context;
    if (!device.context) {
      auto context = Context::open(api, facts.device);
      if (!context) return context.status();
      device.context = std::move(*context);
    }
    ibv_port_attr port{};
    if (api.query_port(device.context->get(), facts.port, &port) == 0 && port.max_msg_sz > 0)
      device.max_message_bytes = port.max_msg_sz;
    device.mtu =
        config.mtu > 0 ? std::min<std::uint32_t>(facts.mtu, static_cast<std::uint32_t>(config.mtu)) : facts.mtu;
    device.facts = std::move(facts);
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace kvferry::verbs
