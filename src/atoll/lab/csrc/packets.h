/* IP packets as a TUN device hands them over: read, cut into what the wire would carry, put together again.
 *
 * Nothing here trusts a length that a packet states: `packet_read` checks all of them once. */
#ifndef ATOLL_PACKETS_H
#define ATOLL_PACKETS_H

#include <stdbool.h>
#include <stdint.h>

/* struct virtio_net_hdr of linux/virtio_net.h, native byte order (which is TUN's default). */
struct vnet {
    uint8_t flags;
    uint8_t gso_type;
    uint16_t hdr_len, gso_size, csum_start, csum_offset;
};
enum { VNET_NEEDS_CSUM = 1 };
enum { GSO_NONE = 0, GSO_TCPV4 = 1, GSO_TCPV6 = 4, GSO_UDP_L4 = 5, GSO_ECN = 0x80 };

enum {
    LONGEST_PACKET = 65535 + 40,  /* IPv6 does not count its header */
    LONGEST_HEADER = 256,         /* IP with options, and TCP or UDP */
    MOST_SEGMENTS = 2048,         /* of one super-packet: 32 bytes each */
};

enum kind { OPAQUE, TCP, UDP };   /* what may be cut or joined: anything else is carried as it is */

/* A packet, or the run of wire packets that a super-packet stands for. Segment i has `header` bytes of
 * headers and `gso` bytes of payload, the last one what remains. */
struct packet {
    enum kind kind;
    bool v6, checked;             /* checked: the kernel left the checksum at csum_start to the device */
    uint8_t ecn;
    uint16_t csum_start, csum_offset;
    uint16_t l4;                  /* where TCP or UDP begins */
    uint16_t header;              /* bytes; 0 for an opaque packet */
    uint16_t segments;
    uint32_t gso;                 /* payload bytes of a segment */
    uint32_t payload;             /* payload bytes of all */
    uint8_t destination[16];      /* IPv4 as ::ffff:a.b.c.d */
};

/* Read the `length` bytes at `data` that came with `vnet`. False if they are no well-formed IP packet. */
bool packet_read(struct packet *p, const struct vnet *vnet, const uint8_t *data, uint32_t length);

static inline uint32_t segment_payload(const struct packet *p, uint32_t segment)
{
    return segment + 1u < p->segments ? p->gso : p->payload - p->gso * (p->segments - 1u);
}

/* Make `header` (a copy of the packet's own) that of segments first to last, with `payload` bytes in
 * `count` packets, and fill `vnet`. */
void packet_head(const struct packet *p, uint8_t *header, uint32_t first, uint32_t last, uint32_t payload,
                 uint32_t count, struct vnet *vnet);

/* Two UDP packets, each of one segment, of the same flow, that may go as one with UDP segmentation. */
bool packets_alike(const struct packet *a, const uint8_t *head_a, const struct packet *b,
                   const uint8_t *head_b);

/* Complete the checksum that `vnet` asks for, and flip one bit behind the IP header; `draw` says which. */
void packet_corrupt(const struct packet *p, uint8_t *data, uint32_t length, struct vnet *vnet, uint64_t draw);

#endif
