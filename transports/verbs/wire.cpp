#include <cstring>
#include <random>

#include <fmt/format.h>
#include <msgpack.hpp>

#include <kvferry/transports/verbs/little_endian.hpp>
#include <kvferry/transports/verbs/registration.hpp>
#include <kvferry/transports/verbs/wire.hpp>

namespace kvferry::verbs {
namespace {

constexpr std::size_t most_devices = 64;
constexpr std::size_t most_gids = 1024;
constexpr std::size_t most_name = 256;

enum class Kind : std::uint8_t { port = 1, connect = 2, connected = 3, close = 4 };

using Packer = msgpack::packer<msgpack::sbuffer>;
using PairFields = std::tuple<std::uint32_t, std::uint32_t>;

std::string bytes_of(const std::uint8_t* data, std::size_t size) { return {reinterpret_cast<const char*>(data), size}; }

template <class... Fields>
std::string pack(Kind kind, const Fields&... fields) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  packer.pack_array(1 + sizeof...(fields));
  packer.pack(static_cast<std::uint8_t>(kind));
  (packer.pack(fields), ...);
  return {buffer.data(), buffer.size()};
}

std::vector<PairFields> fields_of(const std::vector<PairAddress>& pairs) {
  std::vector<PairFields> fields;
  for (const PairAddress& pair : pairs) fields.emplace_back(pair.number, pair.psn);
  return fields;
}

std::vector<PairAddress> pairs_of(const std::vector<PairFields>& fields) {
  std::vector<PairAddress> pairs;
  for (const auto& [number, psn] : fields) pairs.push_back({number, psn});
  return pairs;
}

Status malformed(std::string_view what) {
  return {Errc::malformed, fmt::format("verbs: the peer's connection data: {}", what)};
}

/// Unpacks [kind, fields...] and hands the fields to `use`, which may refuse them.
template <class... Fields, class Use>
auto unpack(std::string_view bytes, Kind kind, Use&& use) -> decltype(use(std::declval<Fields>()...)) {
  try {
    const msgpack::unpack_limit limit(most_gids, 0, most_name, most_name, 0, 6);
    const auto handle = msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr, limit);
    const auto all = handle.get().as<std::tuple<std::uint8_t, Fields...>>();
    if (std::get<0>(all) != static_cast<std::uint8_t>(kind)) return malformed("another kind than expected");
    return std::apply([&](std::uint8_t, const Fields&... fields) { return use(fields...); }, all);
  } catch (const std::exception& error) {
    return malformed(error.what());
  }
}

using GidFields = std::tuple<std::string, std::uint32_t, std::uint8_t, std::uint8_t>;
using DeviceFields = std::tuple<std::string, bool, std::uint16_t, std::uint32_t, std::vector<GidFields>>;

}  // namespace

std::uint64_t random_number() {
  std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

std::string encode(const PortAddress& address) {
  std::vector<DeviceFields> devices;
  for (const DeviceAddress& device : address.devices) {
    std::vector<GidFields> gids;
    for (const Gid& gid : device.gids)
      gids.emplace_back(bytes_of(gid.raw.data(), gid.raw.size()), gid.index, static_cast<std::uint8_t>(gid.type),
                        gid.prefix_bits);
    devices.emplace_back(device.name, device.ethernet, device.lid, device.mtu, std::move(gids));
  }
  return pack(Kind::port, address.port, devices, address.cm_port);
}

Result<PortAddress> decode_port_address(std::string_view bytes) {
  return unpack<std::uint64_t, std::vector<DeviceFields>, std::uint16_t>(
      bytes, Kind::port,
      [](std::uint64_t port, const std::vector<DeviceFields>& devices, std::uint16_t cm_port) -> Result<PortAddress> {
        if (devices.empty() || devices.size() > most_devices) return malformed("no device, or too many");
        PortAddress made;
        made.port = port;
        made.cm_port = cm_port;
        for (const auto& [name, ethernet, lid, mtu, gids] : devices) {
          DeviceAddress device{name, ethernet, lid, mtu, {}};
          for (const auto& [raw, index, type, prefix] : gids) {
            Gid gid;
            if (raw.size() != gid.raw.size() || type > static_cast<std::uint8_t>(GidType::roce_v2) || prefix > 128)
              return malformed("a GID that is none");
            std::memcpy(gid.raw.data(), raw.data(), raw.size());
            gid.index = index;
            gid.type = static_cast<GidType>(type);
            gid.prefix_bits = prefix;
            device.gids.push_back(gid);
          }
          made.devices.push_back(std::move(device));
        }
        return made;
      });
}

std::string encode(const ConnectRequest& request) {
  const std::string token(reinterpret_cast<const char*>(request.token.data()), request.token.size());
  return pack(Kind::connect, token, request.target_incarnation, request.channel, request.device, request.gid_index,
              request.mtu, request.read_depth, request.lid, bytes_of(request.gid.data(), request.gid.size()),
              request.global, fields_of(request.pairs));
}

Result<ConnectRequest> decode_connect_request(std::string_view bytes) {
  return unpack<std::string, std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t,
                std::uint16_t, std::string, bool, std::vector<PairFields>>(
      bytes, Kind::connect,
      [](const std::string& token, std::uint64_t incarnation, std::uint64_t channel, std::uint32_t device,
         std::uint32_t gid_index, std::uint32_t mtu, std::uint32_t read_depth, std::uint16_t lid,
         const std::string& gid, bool global, const std::vector<PairFields>& pairs) -> Result<ConnectRequest> {
        ConnectRequest made;
        if (token.size() != made.token.size() || gid.size() != made.gid.size()) return malformed("a field's length");
        if (pairs.size() < 2 || pairs.size() > most_pairs) return malformed("the number of queue pairs");
        std::memcpy(made.token.data(), token.data(), token.size());
        std::memcpy(made.gid.data(), gid.data(), gid.size());
        made.target_incarnation = incarnation;
        made.channel = channel;
        made.device = device;
        made.gid_index = gid_index;
        made.mtu = mtu;
        made.read_depth = read_depth;
        made.lid = lid;
        made.global = global;
        made.pairs = pairs_of(pairs);
        return made;
      });
}

std::string encode(const ConnectAnswer& answer) {
  return pack(Kind::connected, answer.mtu, answer.read_depth, answer.notifications, answer.messages,
              fields_of(answer.pairs));
}

Result<ConnectAnswer> decode_connect_answer(std::string_view bytes) {
  return unpack<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::vector<PairFields>>(
      bytes, Kind::connected,
      [](std::uint32_t mtu, std::uint32_t read_depth, std::uint32_t notifications, std::uint32_t messages,
         const std::vector<PairFields>& pairs) -> Result<ConnectAnswer> {
        if (pairs.size() > most_pairs || notifications == 0 || messages == 0) return malformed("its limits");
        return ConnectAnswer{mtu, read_depth, notifications, messages, pairs_of(pairs)};
      });
}

std::string encode(const CloseRequest& request) { return pack(Kind::close, request.channel); }

Result<CloseRequest> decode_close_request(std::string_view bytes) {
  return unpack<std::uint64_t>(bytes, Kind::close,
                               [](std::uint64_t channel) -> Result<CloseRequest> { return CloseRequest{channel}; });
}

bool is_close_request(std::string_view bytes) {
  // An array of few elements, then the kind, each in one byte.
  return bytes.size() >= 2 && static_cast<std::uint8_t>(bytes[1]) == static_cast<std::uint8_t>(Kind::close);
}

// ---------------------------------------------------------------- descriptors

std::string encode_keys(const std::vector<RegionKeys>& keys) {
  msgpack::sbuffer buffer;
  msgpack::packer<msgpack::sbuffer> packer(buffer);
  packer.pack_array(static_cast<std::uint32_t>(keys.size()));
  for (const RegionKeys& device : keys) {
    packer.pack_array(4);
    packer.pack(device.address).pack(device.size).pack(device.part_bytes).pack(device.keys);
  }
  return {buffer.data(), buffer.size()};
}

Result<std::vector<RegionKeys>> decode_keys(std::string_view bytes) {
  const auto malformed = [](std::string_view what) {
    return Status(Errc::malformed, fmt::format("verbs: the peer's descriptor of a region: {}", what));
  };
  try {
    const msgpack::unpack_limit limit(most_parts, 0, 0, 0, 0, 3);
    const auto handle = msgpack::unpack(bytes.data(), bytes.size(), nullptr, nullptr, limit);
    using Fields = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::vector<std::uint32_t>>;
    const auto all = handle.get().as<std::vector<Fields>>();
    if (all.empty() || all.size() > most_devices) return malformed("no device, or too many");
    std::vector<RegionKeys> keys;
    for (const auto& [address, size, part_bytes, list] : all) {
      if (part_bytes == 0 || list.empty() || (size - 1) / part_bytes + 1 != list.size())
        return malformed("its parts do not add up");
      keys.push_back({address, size, part_bytes, list});
    }
    return keys;
  } catch (const std::exception& error) {
    return malformed(error.what());
  }
}

// ---------------------------------------------------------------- heads

void encode_head(const Head& head, std::byte* to) noexcept {
  put(to, static_cast<std::uint32_t>(head.kind));
  put(to, head.immediate);
  put(to, head.sequence);
  put(to, head.channel);
  put(to, head.number);
  put(to, head.bytes);
}

Head decode_head(const std::byte* from) noexcept {
  Head head;
  std::uint32_t kind = 0;
  get(from, kind);
  head.kind = static_cast<HeadKind>(kind);
  get(from, head.immediate);
  get(from, head.sequence);
  get(from, head.channel);
  get(from, head.number);
  get(from, head.bytes);
  return head;
}

void encode_numbers(std::deque<std::uint32_t>::const_iterator first, std::size_t count, std::byte* to) noexcept {
  for (std::size_t i = 0; i < count; ++i) put(to, *first++);
}

std::uint32_t decode_number(const std::byte* from) noexcept {
  std::uint32_t number = 0;
  get(from, number);
  return number;
}

}  // namespace kvferry::verbs
