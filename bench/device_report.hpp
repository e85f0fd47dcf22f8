// What RDMA devices this host has, which an engine would use, and why: the contents of kvferry-info.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/api.hpp>
#include <kvferry/transports/verbs/topology.hpp>

namespace kvferry::bench {

/// "ports", "memory" and, when no port can be used, "why_none" with what to do. Errors: invalid_argument for a
/// configured device that does not exist.
Result<nlohmann::ordered_json> describe_devices(verbs::Api& api, const verbs::Topology& topology,
                                                const VerbsConfig& config);
/// The same for people.
std::string devices_as_text(const nlohmann::ordered_json& report);

}  // namespace kvferry::bench
