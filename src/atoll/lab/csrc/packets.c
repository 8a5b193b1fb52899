#include "packets.h"

#include <string.h>

enum { IPPROTO_TCP_ = 6, IPPROTO_UDP_ = 17, TCP_CSUM = 16, UDP_CSUM = 6 };
enum { FIN = 0x01, PSH = 0x08, CWR = 0x80 };

static inline uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static inline void put16(uint8_t *p, uint32_t value) { p[0] = (uint8_t)(value >> 8); p[1] = (uint8_t)value; }
static inline uint32_t get32(const uint8_t *p) { return (uint32_t)get16(p) << 16 | get16(p + 2); }
static inline void put32(uint8_t *p, uint32_t value) { put16(p, value >> 16); put16(p + 2, value); }

/* -- checksums (RFC 1071) -- */

static uint64_t sum_words(const uint8_t *data, uint32_t length, uint64_t sum)
{
    for (; length > 1; data += 2, length -= 2)
        sum += get16(data);
    return length ? sum + ((uint32_t)data[0] << 8) : sum;
}

static uint16_t fold(uint64_t sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

/* The sum that a device with checksum offload expects in the checksum's place. */
static uint16_t pseudo_sum(const struct packet *p, const uint8_t *header, uint32_t length)
{
    uint64_t sum = length + (p->kind == TCP ? IPPROTO_TCP_ : IPPROTO_UDP_);
    return fold(p->v6 ? sum_words(header + 8, 32, sum) : sum_words(header + 12, 8, sum));
}

/* -- reading -- */

/* The IP header: its length, the packet's whole length and the transport protocol; 0 if it is malformed. */
static uint32_t read_ip(struct packet *p, const uint8_t *data, uint32_t available, uint32_t *length,
                        int *protocol)
{
    *protocol = -1;
    if (available >= 20 && data[0] >> 4 == 4) {
        uint32_t header = (data[0] & 15u) * 4u;
        *length = get16(data + 2);
        if (header < 20 || *length < header || *length > available)
            return 0;
        memcpy(p->destination, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12);
        memcpy(p->destination + 12, data + 16, 4);
        if ((get16(data + 6) & 0x3fff) == 0) /* not a fragment */
            *protocol = data[9];
        return header;
    }
    if (available >= 40 && data[0] >> 4 == 6) {
        *length = 40u + get16(data + 4);
        if (*length > available)
            return 0;
        p->v6 = true;
        memcpy(p->destination, data + 24, 16);
        *protocol = data[6];
        return 40;
    }
    return 0;
}

/* Find what may be cut or joined: TCP or UDP whose checksum is left to the device. */
static bool read_transport(struct packet *p, const uint8_t *data, uint32_t length, int protocol)
{
    if (!p->checked || p->csum_start != p->l4)
        return false;
    if (protocol == IPPROTO_TCP_ && p->csum_offset == TCP_CSUM && length >= p->l4 + 20u) {
        uint32_t header = (data[p->l4 + 12] >> 4) * 4u;
        p->kind = TCP;
        p->header = (uint16_t)(p->l4 + header);
        return header >= 20 && p->header <= length;
    }
    if (protocol == IPPROTO_UDP_ && p->csum_offset == UDP_CSUM && length >= p->l4 + 8u) {
        p->kind = UDP;
        p->header = (uint16_t)(p->l4 + 8u);
        return true;
    }
    return false;
}

bool packet_read(struct packet *p, const struct vnet *vnet, const uint8_t *data, uint32_t available)
{
    int type = vnet->gso_type & ~GSO_ECN, protocol;
    uint32_t length;
    memset(p, 0, sizeof *p);
    uint32_t ip = read_ip(p, data, available, &length, &protocol);
    if (!ip)
        return false;
    if (vnet->flags & VNET_NEEDS_CSUM) {
        p->checked = true;
        p->csum_start = vnet->csum_start;
        p->csum_offset = vnet->csum_offset;
        if (p->csum_start < ip || p->csum_start + p->csum_offset + 2u > length)
            return false;
    }
    p->l4 = (uint16_t)ip;
    p->segments = 1;
    bool cut = read_transport(p, data, length, protocol) && p->header <= LONGEST_HEADER;
    if (!cut) {
        p->kind = OPAQUE;
        p->header = 0;
        p->gso = p->payload = length;
        return type == GSO_NONE;
    }
    p->payload = length - p->header;
    p->gso = p->payload;
    if (type == GSO_NONE)
        return true;
    bool agrees = p->kind == UDP ? type == GSO_UDP_L4 : type == (p->v6 ? GSO_TCPV6 : GSO_TCPV4);
    if (!agrees || !vnet->gso_size)
        return false;
    p->ecn = vnet->gso_type & GSO_ECN;
    if (p->payload <= vnet->gso_size)
        return true;
    uint32_t segments = (p->payload + vnet->gso_size - 1) / vnet->gso_size;
    p->gso = vnet->gso_size;
    p->segments = (uint16_t)segments;
    return segments <= MOST_SEGMENTS;
}

/* -- writing -- */

static void put_length(const struct packet *p, uint8_t *header, uint32_t length, uint32_t first)
{
    if (p->v6) {
        put16(header + 4, length - 40);
        return;
    }
    put16(header + 2, length);
    put16(header + 4, get16(header + 4) + first); /* segments count the identification on */
    put16(header + 10, 0);
    put16(header + 10, (uint16_t)~fold(sum_words(header, p->l4, 0)));
}

static void put_tcp(const struct packet *p, uint8_t *tcp, uint32_t first, uint32_t last)
{
    put32(tcp + 4, get32(tcp + 4) + first * p->gso);
    if (first > 0)
        tcp[13] &= (uint8_t)~CWR;
    if (last + 1u < p->segments)
        tcp[13] &= (uint8_t)~(FIN | PSH);
}

void packet_head(const struct packet *p, uint8_t *header, uint32_t first, uint32_t last, uint32_t payload,
                 uint32_t count, struct vnet *vnet)
{
    memset(vnet, 0, sizeof *vnet);
    if (p->checked) {
        vnet->flags = VNET_NEEDS_CSUM;
        vnet->csum_start = p->csum_start;
        vnet->csum_offset = p->csum_offset;
    }
    if (p->kind == OPAQUE)
        return;
    uint32_t length = p->header + payload;
    put_length(p, header, length, first);
    if (p->kind == TCP)
        put_tcp(p, header + p->l4, first, last);
    else
        put16(header + p->l4 + 4, length - p->l4);
    put16(header + p->l4 + p->csum_offset, pseudo_sum(p, header, length - p->l4));
    if (count > 1) {
        vnet->gso_type = p->kind == UDP ? GSO_UDP_L4 : p->v6 ? GSO_TCPV6 : GSO_TCPV4;
        if (p->kind == TCP && first == 0)
            vnet->gso_type |= p->ecn;
        vnet->gso_size = (uint16_t)p->gso;
        vnet->hdr_len = p->header;
    }
}

bool packets_alike(const struct packet *a, const uint8_t *x, const struct packet *b, const uint8_t *y)
{
    if (a->kind != UDP || b->kind != UDP || a->v6 != b->v6 || a->header != b->header || a->segments != 1 ||
        b->segments != 1 || b->payload > a->gso || !b->payload || memcmp(x + a->l4, y + a->l4, 4))
        return false;
    if (a->v6)
        return !memcmp(x, y, 4) && !memcmp(x + 6, y + 6, a->l4 - 6u);
    return !memcmp(x, y, 2) && !memcmp(x + 6, y + 6, 4) && !memcmp(x + 12, y + 12, a->l4 - 12u);
}

void packet_corrupt(const struct packet *p, uint8_t *data, uint32_t length, struct vnet *vnet, uint64_t draw)
{
    if (vnet->flags & VNET_NEEDS_CSUM) {
        uint8_t *place = data + p->csum_start + p->csum_offset;
        uint16_t sum = (uint16_t)~fold(sum_words(data + p->csum_start, length - p->csum_start, 0));
        put16(place, p->kind == UDP && !sum ? 0xffff : sum);
        vnet->flags = 0;
    }
    uint32_t from = p->header && length > p->header ? p->header : p->l4;
    if (length > from)
        data[from + draw / 8 % (length - from)] ^= (uint8_t)(1u << draw % 8);
}
