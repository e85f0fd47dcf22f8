#include "bench/device_report.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

#include <kvferry/transports/verbs/device.hpp>

namespace kvferry::bench {
namespace {

using Json = nlohmann::ordered_json;
using verbs::Distance;
using verbs::Gid;
using verbs::GidFamily;
using verbs::PortFacts;

std::string family_text(const Gid& gid) {
  switch (verbs::family_of(gid.raw)) {
    case GidFamily::ipv4:
      return "IPv4";
    case GidFamily::ipv6:
      return "global IPv6";
    case GidFamily::link_local:
      return "link-local";
    case GidFamily::none:
      break;
  }
  return "no address";
}

/// Rank 1 is what a connection takes unless the peer has nothing of that kind.
std::string why_ranked(const Gid& gid, std::size_t rank) {
  if (rank == 0) return "left out: no interface of this host has this address";
  const std::string what = fmt::format("{}, {}", verbs::to_string(gid.type), family_text(gid));
  return rank == 1 ? "chosen: " + what + " ranks first here" : what;
}

Json describe_gids(const PortFacts& port) {
  Json list = Json::array();
  for (const Gid& gid : port.table) {
    const auto place =
        std::find_if(port.gids.begin(), port.gids.end(), [&](const Gid& ranked) { return ranked.index == gid.index; });
    const std::size_t rank = place == port.gids.end() ? 0 : static_cast<std::size_t>(place - port.gids.begin()) + 1;
    list.push_back({{"index", gid.index},
                    {"address", verbs::to_string(gid.raw)},
                    {"type", verbs::to_string(gid.type)},
                    {"rank", rank},
                    {"why", why_ranked(gid, rank)}});
  }
  return list;
}

std::string why_not(const PortFacts& port, const VerbsConfig& config) {
  const auto named = [&](const std::string& name) { return name == port.device || name == port.name(); };
  if (!config.devices.empty() && std::none_of(config.devices.begin(), config.devices.end(), named))
    return "verbs.devices does not name it";
  return verbs::why_unusable(port, config);
}

Json describe_port(const PortFacts& port, const VerbsConfig& config, const std::vector<verbs::Gpu>& gpus) {
  const std::string why = why_not(port, config);
  Json distances = Json::array();
  for (const verbs::Gpu& gpu : gpus)
    distances.push_back(
        {{"gpu", gpu.slot.address}, {"distance", verbs::to_string(verbs::distance_between(gpu.slot, port.slot))}});
  return {{"name", port.name()},
          {"used", why.empty()},
          {"why_not", why},
          {"state", port.state},
          {"link_layer", port.ethernet ? "Ethernet" : "InfiniBand"},
          {"gbit", port.gbit},
          {"mtu", port.mtu},
          {"lid", port.lid},
          {"pci", port.slot.address},
          {"numa_node", port.slot.numa_node},
          {"gids", describe_gids(port)},
          {"gpus", std::move(distances)}};
}

template <class DistanceTo>
Json nearest_first(const std::vector<PortFacts>& used, DistanceTo&& distance_to) {
  std::vector<const PortFacts*> order;
  for (const PortFacts& port : used) order.push_back(&port);
  std::stable_sort(order.begin(), order.end(),
                   [&](const PortFacts* a, const PortFacts* b) { return distance_to(*a) < distance_to(*b); });
  Json list = Json::array();
  for (const PortFacts* port : order)
    list.push_back({{"name", port->name()}, {"distance", verbs::to_string(distance_to(*port))}});
  return list;
}

Json describe_memory(const std::vector<PortFacts>& used, const verbs::Topology& topology,
                     const std::vector<verbs::Gpu>& gpus) {
  Json list = Json::array();
  for (const int node : topology.numa_nodes())
    list.push_back({{"memory", fmt::format("host, NUMA node {}", node)},
                    {"devices", nearest_first(used, [&](const PortFacts& port) {
                       return verbs::distance_from_node(node, port.slot);
                     })}});
  for (const verbs::Gpu& gpu : gpus)
    list.push_back({{"memory", fmt::format("{} GPU {}", gpu.vendor, gpu.slot.address)},
                    {"devices", nearest_first(used, [&](const PortFacts& port) {
                       return verbs::distance_between(gpu.slot, port.slot);
                     })}});
  return list;
}

std::string or_none(const std::string& text) { return text.empty() ? "none (a device of software)" : text; }

void add_port_text(std::string& text, const Json& port) {
  text += fmt::format("{}  {}\n", port["name"].get<std::string>(),
                      port["used"].get<bool>() ? "used" : "not used: " + port["why_not"].get<std::string>());
  text += fmt::format("  port {}, {}, {} Gb/s, MTU {}\n", port["state"].get<std::string>(),
                      port["link_layer"].get<std::string>(), port["gbit"].get<int>(), port["mtu"].get<int>());
  const int node = port["numa_node"].get<int>();
  text += fmt::format("  PCI address {}, NUMA node {}\n", or_none(port["pci"].get<std::string>()),
                      node < 0 ? "unknown" : std::to_string(node));
  for (const Json& gid : port["gids"])
    text += fmt::format("  GID {:>3}  {}  rank {}: {}\n", gid["index"].get<int>(), gid["address"].get<std::string>(),
                        gid["rank"].get<int>() == 0 ? "-" : std::to_string(gid["rank"].get<int>()),
                        gid["why"].get<std::string>());
  for (const Json& gpu : port["gpus"])
    text += fmt::format("  GPU {}: {}\n", gpu["gpu"].get<std::string>(), gpu["distance"].get<std::string>());
}

}  // namespace

Result<Json> describe_devices(verbs::Api& api, const verbs::Topology& topology, const VerbsConfig& config) {
  Json report = {{"ports", Json::array()}, {"memory", Json::array()}, {"why_none", ""}};
  auto ports = verbs::list_ports(api, topology);
  if (!ports && ports.status() != Errc::unsupported) return ports.status();
  const auto gpus = topology.gpus();
  if (!ports && !config.devices.empty())
    return {Errc::invalid_argument,
            fmt::format("there is no device '{}': {}", config.devices.front(), ports.status().text())};
  if (!ports) {
    report["why_none"] = fmt::format(
        "{} Soft-RoCE makes one of any Ethernet interface: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0",
        ports.status().text());
    return report;
  }
  for (const PortFacts& port : *ports) report["ports"].push_back(describe_port(port, config, gpus));
  const auto used = verbs::choose_ports(*ports, config);
  if (used) {
    report["memory"] = describe_memory(*used, topology, gpus);
  } else {
    if (used.status() == Errc::invalid_argument) return used.status();
    report["why_none"] = used.status().text();
  }
  return report;
}

std::string devices_as_text(const Json& report) {
  std::string text;
  for (const Json& port : report["ports"]) add_port_text(text, port);
  const std::string why_none = report["why_none"].get<std::string>();
  if (!why_none.empty()) return text + why_none + "\n";
  text += "\nmemory, and the devices that carry it, nearest first; farther ones help when the nearer are busy:\n";
  for (const Json& memory : report["memory"]) {
    text += fmt::format("  {}:", memory["memory"].get<std::string>());
    for (const Json& device : memory["devices"])
      text += fmt::format("  {} ({})", device["name"].get<std::string>(), device["distance"].get<std::string>());
    text += "\n";
  }
  return text;
}

}  // namespace kvferry::bench
