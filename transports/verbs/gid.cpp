#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <kvferry/transports/verbs/gid.hpp>

namespace kvferry::verbs {
namespace {

constexpr RawGid mapped_prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr std::uint8_t mapped_bits = 96;

std::uint8_t bits_in(const std::uint8_t* mask, std::size_t bytes) {
  int bits = 0;
  for (std::size_t i = 0; i < bytes; ++i) bits += std::popcount(mask[i]);
  return static_cast<std::uint8_t>(bits);
}

std::optional<InterfaceAddress> address_of(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || entry.ifa_netmask == nullptr) return std::nullopt;
  InterfaceAddress made;
  if (entry.ifa_addr->sa_family == AF_INET) {
    sockaddr_in address{};
    sockaddr_in mask{};
    std::memcpy(&address, entry.ifa_addr, sizeof address);
    std::memcpy(&mask, entry.ifa_netmask, sizeof mask);
    made.address = mapped_prefix;
    std::memcpy(made.address.data() + 12, &address.sin_addr, 4);
    std::uint8_t bytes[4];
    std::memcpy(bytes, &mask.sin_addr, 4);
    made.prefix_bits = static_cast<std::uint8_t>(mapped_bits + bits_in(bytes, 4));
    return made;
  }
  if (entry.ifa_addr->sa_family == AF_INET6) {
    sockaddr_in6 address{};
    sockaddr_in6 mask{};
    std::memcpy(&address, entry.ifa_addr, sizeof address);
    std::memcpy(&mask, entry.ifa_netmask, sizeof mask);
    std::memcpy(made.address.data(), &address.sin6_addr, 16);
    made.prefix_bits = bits_in(mask.sin6_addr.s6_addr, 16);
    made.scope = address.sin6_scope_id;
    return made;
  }
  return std::nullopt;
}

bool same_subnet(const Gid& a, const Gid& b) {
  const std::uint8_t bits = std::min(a.prefix_bits, b.prefix_bits);
  if (bits == 0) return false;
  const std::size_t whole = bits / 8;
  if (!std::equal(a.raw.begin(), a.raw.begin() + whole, b.raw.begin())) return false;
  if (bits % 8 == 0) return true;
  const auto mask = static_cast<std::uint8_t>(0xff00u >> (bits % 8));
  return ((a.raw[whole] ^ b.raw[whole]) & mask) == 0;
}

int rank(const Gid& gid) {
  const int version = gid.type == GidType::roce_v1 ? 2 : 0;
  return version + (family_of(gid.raw) == GidFamily::link_local ? 1 : 0);
}

}  // namespace

GidFamily family_of(const RawGid& raw) noexcept {
  if (std::all_of(raw.begin(), raw.end(), [](std::uint8_t byte) { return byte == 0; })) return GidFamily::none;
  if (std::equal(raw.begin(), raw.begin() + 12, mapped_prefix.begin())) return GidFamily::ipv4;
  if (raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80) return GidFamily::link_local;
  return GidFamily::ipv6;
}

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(first, &::freeifaddrs);
  std::vector<InterfaceAddress> found;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next)
    if (const auto address = address_of(*entry)) found.push_back(*address);
  return found;
}

std::vector<Gid> rank_gids(std::vector<Gid> table, const std::vector<InterfaceAddress>& interfaces) {
  std::vector<Gid> usable;
  for (Gid& gid : table) {
    if (family_of(gid.raw) == GidFamily::none) continue;
    if (gid.type != GidType::infiniband) {
      const auto has = std::find_if(interfaces.begin(), interfaces.end(),
                                    [&](const InterfaceAddress& one) { return one.address == gid.raw; });
      if (has == interfaces.end()) continue;
      gid.prefix_bits = has->prefix_bits;
    }
    usable.push_back(gid);
  }
  std::stable_sort(usable.begin(), usable.end(), [](const Gid& a, const Gid& b) {
    return rank(a) != rank(b) ? rank(a) < rank(b) : a.index < b.index;
  });
  return usable;
}

std::optional<std::pair<Gid, Gid>> match_gids(const std::vector<Gid>& ours, const std::vector<Gid>& theirs) {
  const auto find = [&](auto&& fits) -> std::optional<std::pair<Gid, Gid>> {
    for (const Gid& our : ours)
      for (const Gid& their : theirs)
        if (our.type == their.type && family_of(our.raw) == family_of(their.raw) && fits(our, their))
          return std::pair(our, their);
    return std::nullopt;
  };
  // A shared subnet proves that the two can talk; without one a router may join them, but never
  // link-local addresses.
  if (auto pair = find(
          [](const Gid& a, const Gid& b) { return family_of(a.raw) != GidFamily::link_local && same_subnet(a, b); }))
    return pair;
  if (auto pair = find([](const Gid& a, const Gid&) { return family_of(a.raw) != GidFamily::link_local; })) return pair;
  return find([](const Gid&, const Gid&) { return true; });
}

std::string to_string(const RawGid& raw) {
  char text[INET6_ADDRSTRLEN] = {};
  if (family_of(raw) == GidFamily::ipv4)
    ::inet_ntop(AF_INET, raw.data() + 12, text, sizeof text);
  else
    ::inet_ntop(AF_INET6, raw.data(), text, sizeof text);
  return text;
}

std::string to_string(GidType type) {
  switch (type) {
    case GidType::infiniband:
      return "InfiniBand";
    case GidType::roce_v1:
      return "RoCE v1";
    case GidType::roce_v2:
      return "RoCE v2";
  }
  return "unknown";
}

}  // namespace kvferry::verbs
