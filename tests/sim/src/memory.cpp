#include "memory.h"

#include "machine.h"

namespace moksim {

ShadowCell& Region::cell(uint64_t offset) {
    constexpr uint64_t per_page = kShadowPage / kGranule;
    const uint64_t index = offset / kGranule;
    if (pages.empty()) pages.resize(size / kShadowPage + 1);
    auto& page = pages[index / per_page];
    if (!page) {
        page = std::make_unique<ShadowCell[]>(per_page);
        if (is_initialized)
            for (uint64_t i = 0; i < per_page; ++i) page[i].initialized = 0xffff;
    }
    return page[index % per_page];
}

void Memory::add(Addr base, uint64_t size, const std::string& name, bool is_read_only, bool is_initialized) {
    auto at = regions_.find(base);
    if (at != regions_.end() && at->second->size == size) return;  // keeps what is known of its content
    last_ = nullptr;
    auto old = regions_.lower_bound(base);  // what was there has been freed unnoticed
    if (old != regions_.begin() && std::prev(old)->second->contains(base, 1)) --old;
    while (old != regions_.end() && old->first < base + size) old = regions_.erase(old);
    auto region = std::make_unique<Region>();
    region->base = base;
    region->size = size;
    region->host = reinterpret_cast<uint8_t*>(base);
    region->name = name;
    region->is_read_only = is_read_only;
    region->is_initialized = is_initialized;
    regions_[base] = std::move(region);
}

void Memory::remove(Addr base) {
    last_ = nullptr;
    regions_.erase(base);
}

Region* Memory::find(Addr address) {
    if (last_ && address >= last_->base && address - last_->base < last_->size) return last_;
    auto next = regions_.upper_bound(address);
    if (next == regions_.begin()) return nullptr;
    Region* r = std::prev(next)->second.get();
    if (address - r->base >= r->size) return nullptr;
    return last_ = r;
}

std::string Memory::describe(Addr address) {
    if (Region* r = find(address)) return r->name + "+" + std::to_string(address - r->base);
    auto next = regions_.upper_bound(address);
    std::string text = format("address 0x%lx", static_cast<unsigned long>(address));
    if (next != regions_.begin()) {
        const Region& r = *std::prev(next)->second;
        text += format(" (%lu bytes behind the end of %s, which has %lu)",
                       static_cast<unsigned long>(address - r.base - r.size), r.name.c_str(),
                       static_cast<unsigned long>(r.size));
    }
    return text;
}

static std::string describe_kind(uint8_t kind) {
    std::string text = kind & kAsync ? "async-proxy " : kind & kStrong ? "strong " : "";
    return text + (kind & kWrite ? "write" : "read");
}

static void report_conflict(Machine& m, const char* kind, const char* why, Region& region, uint64_t offset,
                            uint8_t access, const Actor& actor, const ShadowEntry& old) {
    const std::string text =
        format("%s\n  %s of %s+%lu\n  at %s\n  by %s\n  after a %s\n  at %s\n  by %s", why,
               describe_kind(access).c_str(), region.name.c_str(), static_cast<unsigned long>(offset),
               m.source(actor.op).c_str(), m.entity_names[actor.entity].c_str(), describe_kind(old.kind).c_str(),
               m.source(old.op).c_str(), m.entity_names[old.entity].c_str());
    const std::hash<std::string> hash;  // once for each pair of source lines
    m.report(kind, text, hash(m.source(actor.op)) * 31 + hash(m.source(old.op)));
}

// True if the old entry says nothing that the new access does not say as well, for whoever comes next.
static bool is_subsumed(uint8_t old_kind, uint8_t kind) {
    if ((kind & kStrong) && !(old_kind & kStrong)) return false;
    return (kind & kWrite) || !(old_kind & kWrite);
}

static void check_cell(Machine& m, Region& region, uint64_t offset, ShadowCell& cell, uint16_t bytes, uint8_t kind,
                       const Actor& actor) {
    if (cell.generation != m.generation) {
        cell.generation = m.generation;
        for (auto& e : cell.entries) e.bytes = 0;
    }
    ShadowEntry* target = nullptr;
    for (auto& e : cell.entries) {
        const uint16_t overlap = e.bytes & bytes;
        if (!overlap) {
            if (!e.bytes) {
                target = &e;
            } else if (!target && e.entity == actor.entity && e.clock == actor.clock && e.kind == kind &&
                       e.op == (actor.op & 0xffffff)) {
                target = &e;
            }
            continue;
        }
        const bool is_ordered = actor.order->seen[e.entity] >= e.clock;
        const bool are_both_strong = (e.kind & kind & kStrong) && (e.kind & kAsync) == (kind & kAsync);
        if (((e.kind | kind) & kWrite) && !are_both_strong && !is_ordered && (m.config.checks & kCheckRace)) {
            report_conflict(m, "race", "data race: no ordering between", region, offset, kind, actor, e);
        } else if ((kind & kAsync) && (e.kind & kWrite) && !(e.kind & kAsync) && is_ordered &&
                   actor.order->fenced[e.entity] < e.clock && (m.config.checks & kCheckProxy)) {
            report_conflict(m, "proxy", "no fence.proxy.async between", region, offset, kind, actor, e);
        } else if ((kind & kReadOnly) && (e.kind & kWrite) && m.retired.seen[e.entity] < e.clock &&
                   (m.config.checks & kCheckReadOnly)) {
            report_conflict(m, "nc", "ld.global.nc of memory that this kernel writes:", region, offset, kind, actor, e);
        }
        if (is_ordered && is_subsumed(e.kind, kind)) {
            e.bytes &= static_cast<uint16_t>(~bytes);
            if (!e.bytes) target = &e;
        } else if (e.entity == actor.entity && e.clock == actor.clock && e.kind == kind &&
                   e.op == (actor.op & 0xffffff)) {
            target = &e;
        }
    }
    if (!target) target = &cell.entries[cell.victim++ % kCellEntries];
    const bool is_same = target->bytes && target->entity == actor.entity && target->clock == actor.clock &&
                         target->kind == kind && target->op == (actor.op & 0xffffff);
    *target = {actor.clock, actor.entity, static_cast<uint16_t>(bytes | (is_same ? target->bytes : 0)), actor.op, kind};
}

void check_access(Machine& m, Region& region, uint64_t offset, uint64_t bytes, uint8_t kind, const Actor& actor) {
    const uint8_t remembered = kind & ~kAnyContent;
    const bool tracks_races = m.config.checks & (kCheckRace | kCheckProxy | kCheckReadOnly);
    const bool tracks_init = (m.config.checks & kCheckInit) && !region.is_initialized;
    if (!tracks_races && !tracks_init) return;
    const uint64_t end = offset + bytes;
    for (uint64_t at = offset / kGranule * kGranule; at < end; at += kGranule) {
        const uint64_t low = offset > at ? offset - at : 0, high = std::min<uint64_t>(end - at, kGranule);
        const auto part = static_cast<uint16_t>((0xffffu >> (kGranule - (high - low))) << low);
        ShadowCell& cell = region.cell(at);
        if (kind & kWrite) {
            cell.initialized |= part;
        } else if (tracks_init && !(kind & kAnyContent) && (part & ~cell.initialized)) {
            m.report("init",
                     format("read of uninitialised memory: %s+%lu\n  at %s\n  by %s", region.name.c_str(),
                            static_cast<unsigned long>(at), m.source(actor.op).c_str(),
                            m.entity_names[actor.entity].c_str()),
                     actor.op);
        }
        if (tracks_races) check_cell(m, region, at, cell, part, remembered, actor);
    }
}

void copy_initialized(Region& from, uint64_t from_offset, Region& to, uint64_t to_offset, uint64_t bytes) {
    if (from.is_initialized || to.is_initialized) return;
    for (uint64_t i = 0; i < bytes; ++i) {
        const uint64_t at = from_offset + i;
        const uint16_t written = from.cell(at).initialized;
        if (written == 0xffff && at % kGranule == 0 && i + kGranule <= bytes) {
            i += kGranule - 1;
        } else if (!(written >> at % kGranule & 1)) {
            to.cell(to_offset + i).initialized &= static_cast<uint16_t>(~(1u << (to_offset + i) % kGranule));
        }
    }
}

}  // namespace moksim
