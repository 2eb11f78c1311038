// What the upstream and the load generator share: sockets, time, heads and chunks of HTTP/1.1.
#ifndef WIRE_H
#define WIRE_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PIECE (256 * 1024)    // bytes read at once
#define HEAD_MAX 8192         // bytes of a head
#define STAMP_DIGITS 19       // an event's text: nanoseconds of CLOCK_MONOTONIC, zeros in front
#define SECOND 1000000000LL   // nanoseconds

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static inline void die(const char *what) {
    perror(what);
    exit(2);
}

static inline struct sockaddr_in loopback(int port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static inline void no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// The value of a header in a head that ends with a NUL, or NULL.
static inline const char *header(const char *head, const char *name) {
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
        if (strncasecmp(line + 2, name, length) == 0 && line[2 + length] == ':') {
            const char *value = line + 3 + length;
            return value + strspn(value, " ");
        }
    }
    return NULL;
}

static inline bool header_is(const char *head, const char *name, const char *value) {
    const char *found = header(head, name);
    return found && strncasecmp(found, value, strlen(value)) == 0;
}

// Where one is within a body.
struct body {
    enum { LENGTH, CHUNK_SIZE, CHUNK_EXTENSION, CHUNK_DATA, CHUNK_END, TRAILER, COMPLETE } at;
    uint64_t left;  // of the body, or of the chunk
    int line;       // characters of the trailer's line so far
};

static inline struct body body_of(const char *head) {
    if (header_is(head, "transfer-encoding", "chunked")) return (struct body){.at = CHUNK_SIZE};
    const char *length = header(head, "content-length");
    uint64_t left = length ? strtoull(length, NULL, 10) : 0;
    return (struct body){.at = left ? LENGTH : COMPLETE, .left = left};
}

// Take the framing out of `size` bytes, in place. Returns the bytes of payload; -1: that is no body.
static inline ssize_t unframe(struct body *body, char *data, size_t size) {
    size_t in = 0, out = 0;
    while (in < size) {
        char c = data[in];
        switch (body->at) {
        case LENGTH:
        case CHUNK_DATA: {
            size_t take = size - in < body->left ? size - in : body->left;
            if (in != out) memmove(data + out, data + in, take);
            in += take, out += take, body->left -= take;
            if (!body->left) body->at = body->at == LENGTH ? COMPLETE : CHUNK_END;
            break;
        }
        case CHUNK_SIZE:
            in++;
            if (isxdigit((unsigned char)c)) {
                body->left = body->left * 16 + (uint64_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
            } else if (c == ';') {
                body->at = CHUNK_EXTENSION;
            } else if (c == '\n') {
                body->at = body->left ? CHUNK_DATA : TRAILER;
            } else if (c != '\r') {
                return -1;
            }
            break;
        case CHUNK_EXTENSION:
            in++;
            if (c == '\n') body->at = body->left ? CHUNK_DATA : TRAILER;
            break;
        case CHUNK_END:
            in++;
            if (c == '\n') body->at = CHUNK_SIZE;
            else if (c != '\r') return -1;
            break;
        case TRAILER:
            in++;
            if (c == '\n') {
                if (!body->line) body->at = COMPLETE;
                body->line = 0;
            } else if (c != '\r') {
                body->line++;
            }
            break;
        case COMPLETE: return -1;  // nobody here sends a second message before the first is answered
        }
    }
    return (ssize_t)out;
}

#endif
