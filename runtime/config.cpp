#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include <kvferry/runtime/config.hpp>

namespace kvferry {

namespace {

constexpr std::string_view known_transports[] = {"shm", "verbs", "tcp"};
constexpr std::size_t curve_key_characters = 40;

// ---- what one value may be: each answers with the reason against it, or nothing

using Reason = std::optional<std::string>;

bool printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

Reason bad_name(std::string_view name) {
  if (name.size() > 255) return fmt::format("has {} characters", name.size());
  if (!printable(name)) return "has a character that is not printable ASCII";
  return {};
}

Reason bad_host(std::string_view host) {
  if (host.size() > 255) return fmt::format("has a host of {} characters", host.size());
  const bool allowed = std::all_of(host.begin(), host.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("-._:[]*%").find(c) != std::string_view::npos;
  });
  if (!allowed) return fmt::format("has the host '{}', which is neither a name nor an address", host);
  return {};
}

Reason bad_address(std::string_view address) {
  constexpr std::string_view scheme = "tcp://";
  if (address.substr(0, scheme.size()) != scheme) return "does not begin with tcp://";
  address.remove_prefix(scheme.size());
  const std::size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return "lacks a host or a port";
  const std::string_view port = address.substr(colon + 1);
  std::uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size()) return fmt::format("has the port '{}'", port);
  return bad_host(address.substr(0, colon));
}

Reason bad_devices(const std::vector<std::string>& names) {
  for (const std::string& name : names)
    if (name.empty() || name.size() > 64 || !printable(name)) return fmt::format("has '{}', which is no device", name);
  return {};
}

Reason bad_transports(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (std::find(std::begin(known_transports), std::end(known_transports), names[i]) == std::end(known_transports))
      return fmt::format("names '{}'", names[i]);
    if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) !=
        names.begin() + static_cast<std::ptrdiff_t>(i))
      return fmt::format("names '{}' twice", names[i]);
  }
  return {};
}

Reason bad_key(std::string_view key) {
  constexpr std::string_view z85 =
      "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
  if (key.size() != curve_key_characters) return fmt::format("has {} characters", key.size());
  if (key.find_first_not_of(z85) != std::string_view::npos) return "has a character that Z85 does not use";
  return {};
}

Reason bad_optional_key(std::string_view key) { return key.empty() ? Reason() : bad_key(key); }

Reason bad_keys(const std::vector<std::string>& keys) {
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (const Reason reason = bad_key(keys[i])) return fmt::format("key {} {}", i + 1, *reason);
  return {};
}

// ---- text to value and back

template <class T>
struct IsDuration : std::false_type {};
template <class Rep, class Period>
struct IsDuration<std::chrono::duration<Rep, Period>> : std::true_type {};

template <class T>
std::int64_t number_of(const T& value) {
  if constexpr (IsDuration<T>::value) {
    return static_cast<std::int64_t>(value.count());
  } else {
    return static_cast<std::int64_t>(value);
  }
}

bool parse(std::string_view text, std::string& value) {
  value = text;
  return true;
}

bool parse(std::string_view text, bool& value) {
  if (text != "on" && text != "off") return false;
  value = text == "on";
  return true;
}

bool parse(std::string_view text, std::vector<std::string>& value) {
  value.clear();
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    value.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return true;
}

bool parse(std::string_view text, VerbsConnect& value) {
  for (const VerbsConnect one : {VerbsConnect::bootstrap, VerbsConnect::rdmacm}) {
    if (text != to_string(one)) continue;
    value = one;
    return true;
  }
  return false;
}

template <class T>
bool parse_number(std::string_view text, T& value) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return false;
  value = static_cast<T>(number);
  return number_of(value) == number;
}

std::string print(const std::string& value) { return value; }
std::string print(VerbsConnect value) { return std::string(to_string(value)); }
std::string print(bool value) { return value ? "on" : "off"; }
std::string print(const std::vector<std::string>& value) { return fmt::format("{}", fmt::join(value, ",")); }

// ---- one field: what documentation says of it, how it is set, when it is wrong

struct Field {
  ConfigField doc;
  std::function<bool(EngineConfig&, std::string_view)> parse;
  std::function<Reason(const EngineConfig&)> check;
  std::function<std::string(const EngineConfig&)> value;
};

template <class Member>
Field number(std::string name, std::string variable, const std::string& unit, std::int64_t least, std::int64_t most,
             Member member, std::string text) {
  const EngineConfig defaults;
  const std::string fallback = std::to_string(number_of(member(defaults)));
  const std::string suffix = unit.empty() ? "" : " " + unit;
  return {
      {std::move(name), std::move(variable), fmt::format("{} - {}{}", least, most, suffix), fallback, std::move(text)},
      [member](EngineConfig& config, std::string_view value) { return parse_number(value, member(config)); },
      [member, least, most](const EngineConfig& config) {
        const std::int64_t value = number_of(member(config));
        return value < least || value > most ? Reason("is out of range") : Reason();
      },
      [member](const EngineConfig& config) { return std::to_string(number_of(member(config))); }};
}

template <class Member, class Check>
Field words(std::string name, std::string variable, std::string range, Member member, Check check, std::string text) {
  const EngineConfig defaults;
  return {{std::move(name), std::move(variable), std::move(range), print(member(defaults)), std::move(text)},
          [member](EngineConfig& config, std::string_view value) { return parse(value, member(config)); },
          [member, check](const EngineConfig& config) { return check(member(config)); },
          [member](const EngineConfig& config) { return print(member(config)); }};
}

template <class T>
Reason anything(const T&) {
  return {};
}

// Error texts end up in logs, where a secret must not.
Field secret(Field field) {
  field.value = [](const EngineConfig&) { return std::string("(hidden)"); };
  return field;
}

constexpr std::int64_t kib = 1024;
constexpr std::int64_t mib = 1024 * kib;
constexpr std::int64_t gib = 1024 * mib;
constexpr std::int64_t tib = 1024 * gib;

// The one table that parsing, checking and documentation are made from.
std::vector<Field> make_fields() {
  std::vector<Field> fields;
  const auto add = [&fields](Field field) { fields.push_back(std::move(field)); };

  add(words(
      "name", "KVFERRY_NAME", "1 - 255 printable ASCII characters", [](auto& c) -> auto& { return c.name; }, bad_name,
      "Name that peers and the directory know this engine by. Empty: made from host and process id."));
  add(words(
      "listen", "KVFERRY_LISTEN", "tcp://HOST:PORT, PORT 0 - 65535", [](auto& c) -> auto& { return c.listen; },
      bad_address, "Control address to listen on. Port 0 takes a free one; the data port is chosen beside it."));
  add(words(
      "advertise", "KVFERRY_ADVERTISE", "a host name or address without a port",
      [](auto& c) -> auto& { return c.advertise; }, bad_host,
      "Address that peers connect their data sockets to. Empty: the host of listen, or for a wildcard the address on "
      "which the peer reached this engine."));
  add(words(
      "transports", "KVFERRY_TRANSPORTS", fmt::format("a list of {}, each once", fmt::join(known_transports, ", ")),
      [](auto& c) -> auto& { return c.transports; }, bad_transports,
      "Transports to use, best first, separated by commas. Empty: every one that is possible."));
  add(number(
      "rails", "KVFERRY_RAILS", "", 1, 16, [](auto& c) -> auto& { return c.rails; }, "Rails per peer and transport."));
  add(number(
      "pollers", "KVFERRY_POLLERS", "", 1, 16, [](auto& c) -> auto& { return c.pollers; },
      "Poller threads, each with its own group of rails."));
  add(number(
      "connect_timeout", "KVFERRY_CONNECT_TIMEOUT_MS", "ms", 1, 3'600'000,
      [](auto& c) -> auto& { return c.connect_timeout; }, "How long connecting and looking up a region may take."));
  add(number(
      "transfer_timeout", "KVFERRY_TRANSFER_TIMEOUT_MS", "ms", 1, 86'400'000,
      [](auto& c) -> auto& { return c.transfer_timeout; }, "Deadline of transfers that set none themselves."));
  add(number(
      "heartbeat_interval", "KVFERRY_HEARTBEAT_INTERVAL_MS", "ms", 1, 60'000,
      [](auto& c) -> auto& { return c.heartbeat_interval; }, "Time between two heartbeats to a peer."));
  add(number(
      "peer_timeout", "KVFERRY_PEER_TIMEOUT_MS", "ms", 2, 600'000, [](auto& c) -> auto& { return c.peer_timeout; },
      "Silence after which a peer is lost; at least twice heartbeat_interval."));
  add(number(
      "drain_grace", "KVFERRY_DRAIN_GRACE_MS", "ms", 0, 10'000, [](auto& c) -> auto& { return c.drain_grace; },
      "How long an ended transfer may drain before its channel is fenced."));
  add(number(
      "poll_spin", "KVFERRY_POLL_SPIN_US", "us", 0, 1'000'000, [](auto& c) -> auto& { return c.poll_spin; },
      "How long an idle poller looks for work before it sleeps."));
  add(number(
      "wait_spin", "KVFERRY_WAIT_SPIN_US", "us", 0, 1'000'000, [](auto& c) -> auto& { return c.wait_spin; },
      "How long Transfer::wait looks before it sleeps."));
  add(number(
      "split_bytes", "KVFERRY_SPLIT_BYTES", "bytes", 1, 1024 * tib, [](auto& c) -> auto& { return c.split_bytes; },
      "Transfers of at least this size use several pollers."));
  add(number(
      "tcp.sockets", "KVFERRY_TCP_SOCKETS", "", 1, 64, [](auto& c) -> auto& { return c.tcp.sockets; },
      "TCP connections per rail."));
  add(number(
      "tcp.chunk_bytes", "KVFERRY_TCP_CHUNK_BYTES", "bytes", 4 * kib, 64 * mib,
      [](auto& c) -> auto& { return c.tcp.chunk_bytes; }, "Most bytes of one TCP request."));
  add(number(
      "tcp.socket_buffer_bytes", "KVFERRY_TCP_SOCKET_BUFFER_BYTES", "bytes", 0, gib,
      [](auto& c) -> auto& { return c.tcp.socket_buffer_bytes; },
      "Socket buffers asked of the kernel. 0 leaves its own tuning."));
  add(words(
      "shm.enabled", "KVFERRY_SHM", "on or off", [](auto& c) -> auto& { return c.shm.enabled; }, anything<bool>,
      "Whether peers on the same host are reached through shared memory."));
  add(number(
      "shm.copy_threads", "KVFERRY_SHM_COPY_THREADS", "", 0, 64, [](auto& c) -> auto& { return c.shm.copy_threads; },
      "Helper threads that copy large transfers. 0 copies on the poller."));
  add(words(
      "shm.waiters_copy", "KVFERRY_SHM_WAITERS_COPY", "on or off", [](auto& c) -> auto& { return c.shm.waiters_copy; },
      anything<bool>, "Whether threads in Transfer::wait take part in copying."));
  add(number(
      "shm.chunk_bytes", "KVFERRY_SHM_CHUNK_BYTES", "bytes", 4 * kib, 64 * mib,
      [](auto& c) -> auto& { return c.shm.chunk_bytes; }, "Most bytes copied between two looks at the queues."));
  add(number(
      "shm.streaming_bytes", "KVFERRY_SHM_STREAMING_BYTES", "bytes", 0, 1024 * tib,
      [](auto& c) -> auto& { return c.shm.streaming_bytes; },
      "Batches of at least this size are copied with streaming stores. 0: never."));
  add(words(
      "verbs.enabled", "KVFERRY_VERBS", "on or off", [](auto& c) -> auto& { return c.verbs.enabled; }, anything<bool>,
      "Whether RDMA is used where there are devices."));
  add(words(
      "verbs.devices", "KVFERRY_VERBS_DEVICES", "a list of devices such as mlx5_0 or mlx5_0:2",
      [](auto& c) -> auto& { return c.verbs.devices; }, bad_devices,
      "RDMA devices to use, best first, separated by commas. Empty: every active one."));
  add(words(
      "verbs.connect", "KVFERRY_VERBS_CONNECT", "bootstrap or rdmacm", [](auto& c) -> auto& { return c.verbs.connect; },
      anything<VerbsConnect>,
      "Whether queue pairs are connected over the control connection or by librdmacm. Both engines need the same."));
  add(number(
      "verbs.queue_pairs", "KVFERRY_VERBS_QUEUE_PAIRS", "", 1, 16, [](auto& c) -> auto& { return c.verbs.queue_pairs; },
      "Queue pairs per RDMA rail."));
  add(number(
      "verbs.queue_depth", "KVFERRY_VERBS_QUEUE_DEPTH", "", 16, 16384,
      [](auto& c) -> auto& { return c.verbs.queue_depth; }, "Requests in flight per queue pair."));
  add(number(
      "verbs.chunk_bytes", "KVFERRY_VERBS_CHUNK_BYTES", "bytes", 4 * kib, 64 * mib,
      [](auto& c) -> auto& { return c.verbs.chunk_bytes; }, "Larger slices are cut into pieces of this size."));
  add(number(
      "verbs.gid_index", "KVFERRY_VERBS_GID_INDEX", "", -1, 1023, [](auto& c) -> auto& { return c.verbs.gid_index; },
      "Place of the GID in the port's table. -1 chooses by what the GIDs are."));
  add(number(
      "verbs.mtu", "KVFERRY_VERBS_MTU", "bytes", 0, 4096, [](auto& c) -> auto& { return c.verbs.mtu; },
      "Most bytes of a packet, rounded down to 256, 512, 1024, 2048 or 4096. 0: the port's."));
  add(number(
      "verbs.timeout", "KVFERRY_VERBS_TIMEOUT", "", 1, 31, [](auto& c) -> auto& { return c.verbs.timeout; },
      "4.096 us x 2^timeout pass until a lost packet is repeated (IBTA's local ACK timeout)."));
  add(number(
      "verbs.retries", "KVFERRY_VERBS_RETRIES", "", 0, 7, [](auto& c) -> auto& { return c.verbs.retries; },
      "Repeats of a packet until the channel has failed. On Soft-RoCE 7 repeats for ever."));
  add(number(
      "verbs.rnr_timer", "KVFERRY_VERBS_RNR_TIMER", "", 1, 31, [](auto& c) -> auto& { return c.verbs.rnr_timer; },
      "IBTA's code of the time until a message is repeated whose receiver was not ready."));
  add(number(
      "verbs.traffic_class", "KVFERRY_VERBS_TRAFFIC_CLASS", "", 0, 255,
      [](auto& c) -> auto& { return c.verbs.traffic_class; },
      "Traffic class (DSCP x 4 and ECN bits) of RoCE packets."));
  add(number(
      "verbs.service_level", "KVFERRY_VERBS_SERVICE_LEVEL", "", 0, 15,
      [](auto& c) -> auto& { return c.verbs.service_level; }, "InfiniBand service level."));
  add(words(
      "verbs.relaxed_ordering", "KVFERRY_VERBS_RELAXED_ORDERING", "on or off",
      [](auto& c) -> auto& { return c.verbs.relaxed_ordering; }, anything<bool>,
      "Lets PCIe reorder the device's writes of data, where that is faster."));
  add(words(
      "curve_public_key", "KVFERRY_CURVE_PUBLIC_KEY", "40 characters of Z85",
      [](auto& c) -> auto& { return c.curve_public_key; }, bad_optional_key,
      "CurveZMQ public key of this engine; needs curve_secret_key. Empty: no CurveZMQ."));
  add(secret(words(
      "curve_secret_key", "KVFERRY_CURVE_SECRET_KEY", "40 characters of Z85",
      [](auto& c) -> auto& { return c.curve_secret_key; }, bad_optional_key,
      "CurveZMQ secret key of this engine; needs curve_public_key.")));
  add(words(
      "curve_peer_keys", "KVFERRY_CURVE_PEER_KEYS", "a list of keys, 40 characters of Z85 each",
      [](auto& c) -> auto& { return c.curve_peer_keys; }, bad_keys,
      "Public keys of the peers that may connect, separated by commas. With an own pair and an empty list, nobody "
      "may."));
  add(words(
      "curve_server_key", "KVFERRY_CURVE_SERVER_KEY", "40 characters of Z85",
      [](auto& c) -> auto& { return c.curve_server_key; }, bad_optional_key,
      "Public key that every peer this engine connects to must prove to hold."));
  return fields;
}

const std::vector<Field>& fields() {
  static const std::vector<Field> table = make_fields();
  return table;
}

// ---- what fields must keep to among each other

Status check_together(const EngineConfig& config) {
  if (config.peer_timeout < 2 * config.heartbeat_interval)
    return {
        Errc::invalid_argument,
        fmt::format("peer_timeout is {} ms, less than twice heartbeat_interval ({} ms): one late heartbeat would lose "
                    "the peer",
                    config.peer_timeout.count(), config.heartbeat_interval.count())};
  if (config.curve_public_key.empty() != config.curve_secret_key.empty())
    return {Errc::invalid_argument,
            fmt::format("{} is set without {}: CurveZMQ needs the pair",
                        config.curve_public_key.empty() ? "curve_secret_key" : "curve_public_key",
                        config.curve_public_key.empty() ? "curve_public_key" : "curve_secret_key")};
  if (config.curve_public_key.empty() && !(config.curve_peer_keys.empty() && config.curve_server_key.empty()))
    return {Errc::invalid_argument,
            fmt::format("{} is set without curve_public_key and curve_secret_key: CurveZMQ needs "
                        "an own pair",
                        config.curve_peer_keys.empty() ? "curve_server_key" : "curve_peer_keys")};
  return {};
}

}  // namespace

std::string_view to_string(VerbsConnect connect) noexcept {
  return connect == VerbsConnect::rdmacm ? "rdmacm" : "bootstrap";
}

Status EngineConfig::apply_environment() {
  for (const Field& field : fields()) {
    const char* value = std::getenv(field.doc.variable.c_str());
    if (value == nullptr || field.parse(*this, value)) continue;
    return {Errc::invalid_argument,
            fmt::format("{}='{}' can not be read: expected {}", field.doc.variable, value, field.doc.range)};
  }
  return {};
}

Status EngineConfig::validate() const {
  for (const Field& field : fields()) {
    const Reason reason = field.check(*this);
    if (reason)
      return {Errc::invalid_argument,
              fmt::format("{} = '{}' {}: expected {}", field.doc.name, field.value(*this), *reason, field.doc.range)};
  }
  return check_together(*this);
}

std::vector<ConfigField> config_fields() {
  std::vector<ConfigField> docs;
  for (const Field& field : fields()) docs.push_back(field.doc);
  return docs;
}

}  // namespace kvferry
