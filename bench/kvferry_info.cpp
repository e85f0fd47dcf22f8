// Lists what this host has for kvferry: transports, RDMA devices, which of them would be used for which memory, and
// why.
//
//   kvferry-info --output text|json --devices mlx5_0,mlx5_1
//
// Takes the same KVFERRY_* variables as an engine.
#include <cstdio>
#include <string>

#include <fmt/format.h>
#include <gflags/gflags.h>
#include <nlohmann/json.hpp>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/host.hpp>
#include <kvferry/runtime/region.hpp>

#include "bench/sizes.hpp"
#if KVFERRY_HAS_VERBS
#include "bench/device_report.hpp"
#endif

DEFINE_string(devices, "", "RDMA devices to use, separated by commas, as verbs.devices; empty: every active one");
DEFINE_string(output, "text", "text or json");

namespace kvferry::bench {
namespace {

using Json = nlohmann::ordered_json;

Json describe_shm(const EngineConfig& config) {
  if (!config.shm.enabled) return {{"available", false}, {"why", "shm.enabled is off"}};
  // What an engine does first when a program asks for shareable memory.
  const auto region = allocate_region("probe", 4096, Access::read_write);
  if (!region) return {{"available", false}, {"why", std::string(region.status().text())}};
  return {{"available", true}, {"why", "between engines of this host, id " + local_host().host_id}};
}

#if KVFERRY_HAS_VERBS
Result<Json> describe_rdma(const VerbsConfig& config) {
  return describe_devices(verbs::system_api(), verbs::Topology(), config);
}
#else
Result<Json> describe_rdma(const VerbsConfig&) {
  return Json{{"ports", Json::array()},
              {"memory", Json::array()},
              {"why_none", "this kvferry was built without RDMA: install libibverbs-dev and build it again"}};
}
std::string devices_as_text(const Json& report) { return report["why_none"].get<std::string>() + "\n"; }
#endif

Json describe_verbs(const EngineConfig& config, const Json& rdma) {
  if (!config.verbs.enabled) return {{"available", false}, {"why", "verbs.enabled is off"}};
  if (!rdma["why_none"].get<std::string>().empty())
    return {{"available", false}, {"why", "no RDMA device can be used; see RDMA devices"}};
  return {{"available", true}, {"why", "with peers that have RDMA devices on the same network"}};
}

int run() {
  if (FLAGS_output != "text" && FLAGS_output != "json")
    throw StatusError({Errc::invalid_argument, fmt::format("--output={}: not one of text, json", FLAGS_output)});
  EngineConfig config;
  if (!FLAGS_devices.empty()) config.verbs.devices = split_list(FLAGS_devices);
  if (Status status = config.apply_environment(); !status) throw StatusError(status);
  if (Status status = config.validate(); !status) throw StatusError(status);
  auto rdma = describe_rdma(config.verbs);
  if (!rdma) throw StatusError(rdma.status());
  const Json transports = {{"shm", describe_shm(config)},
                           {"verbs", describe_verbs(config, *rdma)},
                           {"tcp", {{"available", true}, {"why", "between any two hosts"}}}};
  if (FLAGS_output == "json") {
    fmt::print("{}\n", Json{{"transports", transports}, {"rdma", *rdma}}.dump(2));
    return 0;
  }
  for (const auto& [name, facts] : transports.items())
    fmt::print("{:<6} {:<4} {}\n", name, facts["available"].get<bool>() ? "yes" : "no",
               facts["why"].get<std::string>());
  fmt::print("\nRDMA devices:\n{}", devices_as_text(*rdma));
  return 0;
}

}  // namespace
}  // namespace kvferry::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("what this host has for kvferry: transports, RDMA devices, and which would be used");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  try {
    return kvferry::bench::run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "kvferry-info: {}\n", e.what());
    return 2;
  }
}
