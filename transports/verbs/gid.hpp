// Which GID a RoCE connection uses: ranked by what it is, never by its place in the table.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::verbs {

using RawGid = std::array<std::uint8_t, 16>;

enum class GidType : std::uint8_t { infiniband = 0, roce_v1 = 1, roce_v2 = 2 };

/// One entry of a port's GID table.
struct Gid {
  RawGid raw{};
  std::uint32_t index = 0;
  GidType type = GidType::infiniband;
  /// Leading bits that name its subnet, from the interface that has the address; 0 when unknown.
  std::uint8_t prefix_bits = 0;

  friend bool operator==(const Gid&, const Gid&) = default;
};

enum class GidFamily : std::uint8_t { ipv4, ipv6, link_local, none };
GidFamily family_of(const RawGid& raw) noexcept;

/// An address of this host's interfaces, in the form of a GID (IPv4 mapped into IPv6).
struct InterfaceAddress {
  RawGid address{};
  std::uint8_t prefix_bits = 0;  ///< counted in the 128 bits
  std::uint32_t scope = 0;       ///< of a link-local address: its interface
};
std::vector<InterfaceAddress> interface_addresses();

/// Usable entries, best first: RoCE v2 before v1; IPv4 and global IPv6 before link-local; then by index.
/// RoCE entries whose address no interface has are left out, since nothing would answer there.
std::vector<Gid> rank_gids(std::vector<Gid> table, const std::vector<InterfaceAddress>& interfaces);

/// The first of `ours` for which `theirs` has one of the same type and family, preferring a pair in one
/// subnet. Both lists are ranked. Nothing when no pair can talk.
std::optional<std::pair<Gid, Gid>> match_gids(const std::vector<Gid>& ours, const std::vector<Gid>& theirs);

/// As an address: "10.0.0.1" or "fe80::1".
std::string to_string(const RawGid& raw);
std::string to_string(GidType type);

}  // namespace kvferry::verbs
