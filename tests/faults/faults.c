/* Preloaded into a process: fails, shortens or kills at one of its calls on files of a folder, and
 * records what it does to them.
 *
 * Only paths under the folder count, and descriptors that were opened by such a path. A plan is made
 * by fault_plan(), which a process calls once it has been forked. Until then nothing is touched.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
    OPEN, READ, PREAD, WRITE, PWRITE, FSYNC, RENAME, LINK, UNLINK, MKDIR, STAT, MMAP, CLOSE,
    TRUNCATE, LOCK, NUM_KINDS
};
enum { SHORT = -1, KILL = -2 };  /* in the place of an error's number */
#define MOST_FDS 4096

static struct {
    char folder[PATH_MAX];
    size_t length;
    int kind, fault, is_lasting;
    long nth;
    int log_fd;
} plan = {.log_fd = -1};
static long *counts;  /* of calls of each kind, and last of faults: whoever forks sees them, too */
static char *paths[MOST_FDS];  /* of descriptors on files of the folder; NULL: others */
static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name) ((__typeof__(&name))real(#name, &cached_##name))
#define CACHE(name) static void *cached_##name

static void *real(const char *name, void **cached) {
    if (*cached == NULL) {
        *cached = dlsym(RTLD_NEXT, name);
    }
    return *cached;
}

/* Begin to count, and to fault the nth call of a kind (0: none, -1 as kind: none).
 * log: a file that is to hold a record of each change; NULL: none. */
void fault_plan(const char *folder, int kind, long nth, int fault, int is_lasting, const char *log) {
    strncpy(plan.folder, folder, PATH_MAX - 1);
    plan.length = strlen(folder);
    plan.kind = kind;
    plan.nth = nth;
    plan.fault = fault;
    plan.is_lasting = is_lasting;
    memset(counts, 0, (NUM_KINDS + 1) * sizeof *counts);
    if (log != NULL) {
        int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        plan.log_fd = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 900);
        syscall(SYS_close, fd);
    }
}

/* Return how many calls of a kind there were; of the kind after the last one: how many faults. */
long fault_count(int kind) { return counts[kind]; }

__attribute__((constructor)) static void share_counts(void) {
    size_t size = (NUM_KINDS + 1) * sizeof *counts;
    counts = (long *)syscall(
        SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static int is_under(const char *path) {
    return plan.length > 0 && path != NULL && strncmp(path, plan.folder, plan.length) == 0 &&
        (path[plan.length] == '/' || path[plan.length] == 0);
}

/* Write the whole of a path beneath a descriptor, if it is of the folder; return whether it is. */
static int resolve(int folder_fd, const char *path, char whole[PATH_MAX]) {
    if (plan.length == 0 || path == NULL) {
        return 0;
    }
    if (path[0] == '/') {
        snprintf(whole, PATH_MAX, "%s", path);
    } else if (folder_fd >= 0 && folder_fd < MOST_FDS && paths[folder_fd] != NULL) {
        snprintf(whole, PATH_MAX, "%s/%s", paths[folder_fd], path);
    } else {
        return 0;
    }
    return is_under(whole);
}

static int is_tracked(int fd) { return fd >= 0 && fd < MOST_FDS && paths[fd] != NULL; }

/* Count a call; return what is to become of it: 0, an error's number, SHORT; or do not return. */
static int met(enum kind kind) {
    pthread_mutex_lock(&mutex);
    long number = ++counts[kind];
    int is_hit = plan.nth > 0 && plan.kind == (int)kind &&
        (plan.is_lasting ? number >= plan.nth : number == plan.nth);
    counts[NUM_KINDS] += is_hit;
    pthread_mutex_unlock(&mutex);
    if (!is_hit) {
        return 0;
    }
    if (plan.fault == KILL) {
        syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    }
    return plan.fault;
}

#define FAULT(kind) \
    do { \
        int fault_ = met(kind); \
        if (fault_ > 0) { \
            errno = fault_; \
            return -1; \
        } \
    } while (0)

/* How many bytes a call that may be shortened is to do. */
#define FAULT_OR_LENGTH(kind, length) \
    do { \
        int fault_ = met(kind); \
        if (fault_ > 0) { \
            errno = fault_; \
            return -1; \
        } \
        if (fault_ == SHORT && (length) > 1) { \
            length /= 2; \
        } \
    } while (0)

struct __attribute__((packed)) entry {
    uint8_t what;
    int32_t fd;
    int64_t place;
    uint32_t num_bytes, num_path, num_other;
};

static void put(const void *data, size_t size) {
    const char *from = data;
    while (size > 0) {
        long count = syscall(SYS_write, plan.log_fd, from, size);
        if (count <= 0) {
            abort();
        }
        from += count;
        size -= count;
    }
}

static void note(
    char what, int fd, int64_t place, const void *data, size_t size, const char *path,
    const char *other) {
    if (plan.log_fd < 0) {
        return;
    }
    int before = errno;
    size_t num_path = path ? strlen(path) : 0, num_other = other ? strlen(other) : 0;
    struct entry entry = {what, fd, place, size, num_path, num_other};
    put(&entry, sizeof entry);
    put(path, num_path);
    put(other, num_other);
    put(data, size);
    errno = before;
}

static void track(int fd, const char *path) {
    if (fd >= 0 && fd < MOST_FDS) {
        free(paths[fd]);
        paths[fd] = path ? strdup(path) : NULL;
    }
}

#define LOCKED(type, value) \
    pthread_mutex_lock(&mutex); \
    type result = value

#define UNLOCK() pthread_mutex_unlock(&mutex)

/* ---- open ---- */

#define OPEN_BODY(folder_fd, call) \
    char whole[PATH_MAX]; \
    int is_ours = resolve(folder_fd, path, whole); \
    if (is_ours) { \
        FAULT(OPEN); \
    } \
    LOCKED(int, call); \
    if (result >= 0) { \
        track(result, is_ours ? whole : NULL); \
        if (is_ours) { \
            note('O', result, flags, NULL, 0, whole, NULL); \
        } \
    } \
    UNLOCK(); \
    return result

#define MODE() \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

CACHE(open);
int open(const char *path, int flags, ...) {
    MODE();
    OPEN_BODY(-1, REAL(open)(path, flags, mode));
}
CACHE(open64);
int open64(const char *path, int flags, ...) {
    MODE();
    OPEN_BODY(-1, REAL(open64)(path, flags, mode));
}
CACHE(openat);
int openat(int at, const char *path, int flags, ...) {
    MODE();
    OPEN_BODY(at, REAL(openat)(at, path, flags, mode));
}
CACHE(openat64);
int openat64(int at, const char *path, int flags, ...) {
    MODE();
    OPEN_BODY(at, REAL(openat64)(at, path, flags, mode));
}
CACHE(creat);
int creat(const char *path, mode_t mode) {
    int flags = O_CREAT | O_WRONLY | O_TRUNC;
    OPEN_BODY(-1, REAL(creat)(path, mode));
}
CACHE(opendir);
DIR *opendir(const char *path) {
    char whole[PATH_MAX];
    if (resolve(-1, path, whole)) {
        int fault = met(OPEN);
        if (fault > 0) {
            errno = fault;
            return NULL;
        }
    }
    return REAL(opendir)(path);
}
CACHE(fopen64);
FILE *fopen64(const char *path, const char *how) {
    char whole[PATH_MAX];
    if (resolve(-1, path, whole)) {
        int fault = met(OPEN);
        if (fault > 0) {
            errno = fault;
            return NULL;
        }
    }
    return REAL(fopen64)(path, how);
}

/* ---- descriptors ---- */

CACHE(close);
int close(int fd) {
    if (!is_tracked(fd)) {
        return REAL(close)(fd);
    }
    int fault = met(CLOSE);
    LOCKED(int, REAL(close)(fd));
    note('C', fd, 0, NULL, 0, NULL, NULL);
    track(fd, NULL);
    UNLOCK();
    if (fault > 0) {  /* Linux has closed it all the same */
        errno = fault;
        return -1;
    }
    return result;
}

static void copy_fd(int from, int to) {
    if (to >= 0 && is_tracked(from)) {
        track(to, paths[from]);
        note('P', from, to, NULL, 0, NULL, NULL);
    }
}
CACHE(dup);
int dup(int fd) {
    LOCKED(int, REAL(dup)(fd));
    copy_fd(fd, result);
    UNLOCK();
    return result;
}
CACHE(dup2);
int dup2(int fd, int to) {
    LOCKED(int, REAL(dup2)(fd, to));
    copy_fd(fd, result);
    UNLOCK();
    return result;
}

CACHE(fcntl64);
int fcntl64(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (is_tracked(fd) && (command == F_SETLK || command == F_SETLKW)) {
        FAULT(LOCK);
    }
    int result = REAL(fcntl64)(fd, command, argument);
    if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) {
        pthread_mutex_lock(&mutex);
        copy_fd(fd, result);
        UNLOCK();
    }
    return result;
}
int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return fcntl64(fd, command, argument);
}
CACHE(flock);
int flock(int fd, int how) {
    if (is_tracked(fd) && !(how & LOCK_UN)) {
        FAULT(LOCK);
    }
    return REAL(flock)(fd, how);
}

/* ---- bytes ---- */

CACHE(read);
ssize_t read(int fd, void *to, size_t length) {
    if (is_tracked(fd)) {
        FAULT_OR_LENGTH(READ, length);
    }
    return REAL(read)(fd, to, length);
}
CACHE(pread64);
ssize_t pread64(int fd, void *to, size_t length, off64_t place) {
    if (is_tracked(fd)) {
        FAULT_OR_LENGTH(PREAD, length);
    }
    return REAL(pread64)(fd, to, length, place);
}
ssize_t pread(int fd, void *to, size_t length, off_t place) { return pread64(fd, to, length, place); }

CACHE(write);
ssize_t write(int fd, const void *from, size_t length) {
    if (!is_tracked(fd)) {
        return REAL(write)(fd, from, length);
    }
    FAULT_OR_LENGTH(WRITE, length);
    LOCKED(ssize_t, REAL(write)(fd, from, length));
    if (result > 0) {
        note('W', fd, lseek(fd, 0, SEEK_CUR) - result, from, result, NULL, NULL);
    }
    UNLOCK();
    return result;
}
CACHE(pwrite64);
ssize_t pwrite64(int fd, const void *from, size_t length, off64_t place) {
    if (!is_tracked(fd)) {
        return REAL(pwrite64)(fd, from, length, place);
    }
    FAULT_OR_LENGTH(PWRITE, length);
    LOCKED(ssize_t, REAL(pwrite64)(fd, from, length, place));
    if (result > 0) {
        note('W', fd, place, from, result, NULL, NULL);
    }
    UNLOCK();
    return result;
}
ssize_t pwrite(int fd, const void *from, size_t length, off_t place) {
    return pwrite64(fd, from, length, place);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    static void *cached_writev;
    if (!is_tracked(fd)) {
        return REAL(writev)(fd, parts, count);
    }
    for (int part = 0; part < count; part++) {  /* the first that has bytes: a short count */
        if (parts[part].iov_len > 0) {
            return write(fd, parts[part].iov_base, parts[part].iov_len);
        }
    }
    return 0;
}

/* Bytes that go from file to file: read and written, so that they are recorded. */
static ssize_t copy_bytes(int out, int in, off64_t *place, size_t length) {
    char bytes[65536];
    size_t most = length < sizeof bytes ? length : sizeof bytes;
    ssize_t count = place ? pread64(in, bytes, most, *place) : read(in, bytes, most);
    if (count <= 0) {
        return count;
    }
    ssize_t written = write(out, bytes, count);
    if (written >= 0 && place) {
        *place += written;
    } else if (!place && written < count) {
        lseek(in, (written > 0 ? written : 0) - count, SEEK_CUR);
    }
    return written;
}
CACHE(sendfile64);
ssize_t sendfile64(int out, int in, off64_t *place, size_t length) {
    if (!is_tracked(out)) {
        return REAL(sendfile64)(out, in, place, length);
    }
    return copy_bytes(out, in, place, length);
}
CACHE(copy_file_range);
ssize_t copy_file_range(
    int in, off64_t *in_place, int out, off64_t *out_place, size_t length, unsigned flags) {
    if (!is_tracked(out)) {
        return REAL(copy_file_range)(in, in_place, out, out_place, length, flags);
    }
    if (out_place != NULL) {
        errno = EXDEV;
        return -1;
    }
    return copy_bytes(out, in, in_place, length);
}
CACHE(ftruncate64);
int ftruncate64(int fd, off64_t length) {
    if (!is_tracked(fd)) {
        return REAL(ftruncate64)(fd, length);
    }
    FAULT(TRUNCATE);
    LOCKED(int, REAL(ftruncate64)(fd, length));
    if (result == 0) {
        note('T', fd, length, NULL, 0, NULL, NULL);
    }
    UNLOCK();
    return result;
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

CACHE(posix_fallocate64);
int posix_fallocate64(int fd, off64_t place, off64_t length) {
    if (!is_tracked(fd)) {
        return REAL(posix_fallocate64)(fd, place, length);
    }
    int fault = met(TRUNCATE);
    if (fault > 0) {
        return fault;
    }
    LOCKED(int, REAL(posix_fallocate64)(fd, place, length));
    struct stat64 found;
    if (result == 0 && syscall(SYS_fstat, fd, &found) == 0) {
        note('T', fd, found.st_size, NULL, 0, NULL, NULL);
    }
    UNLOCK();
    return result;
}

static int sync_fd(int fd, int (*call)(int)) {
    if (!is_tracked(fd)) {
        return call(fd);
    }
    FAULT(FSYNC);
    LOCKED(int, call(fd));
    if (result == 0) {
        note('S', fd, 0, NULL, 0, NULL, NULL);
    }
    UNLOCK();
    return result;
}
CACHE(fsync);
int fsync(int fd) { return sync_fd(fd, REAL(fsync)); }
CACHE(fdatasync);
int fdatasync(int fd) { return sync_fd(fd, REAL(fdatasync)); }

CACHE(mmap64);
void *mmap64(void *at, size_t length, int access, int flags, int fd, off64_t place) {
    if (fd >= 0 && is_tracked(fd)) {
        int fault = met(MMAP);
        if (fault > 0) {
            errno = fault;
            return MAP_FAILED;
        }
        if ((flags & MAP_SHARED) && (access & PROT_WRITE)) {
            note('m', fd, place, NULL, 0, NULL, NULL);
        }
    }
    return REAL(mmap64)(at, length, access, flags, fd, place);
}
void *mmap(void *at, size_t length, int access, int flags, int fd, off_t place) {
    return mmap64(at, length, access, flags, fd, place);
}

/* ---- names ---- */

#define NAMES_BODY(kind, what, from_fd, from, to_fd, to, call) \
    char whole[PATH_MAX], other[PATH_MAX]; \
    int is_ours = resolve(from_fd, from, whole) | resolve(to_fd, to, other); \
    if (is_ours) { \
        FAULT(kind); \
    } \
    LOCKED(int, call); \
    if (result == 0 && is_ours) { \
        note(what, -1, 0, NULL, 0, whole, other); \
    } \
    UNLOCK(); \
    return result

#define NAME_BODY(kind, what, at, call) \
    char whole[PATH_MAX]; \
    int is_ours = resolve(at, path, whole); \
    if (is_ours) { \
        FAULT(kind); \
    } \
    LOCKED(int, call); \
    if (result == 0 && is_ours && what != 0) { \
        note(what, -1, 0, NULL, 0, whole, NULL); \
    } \
    UNLOCK(); \
    return result

CACHE(rename);
int rename(const char *from, const char *to) {
    NAMES_BODY(RENAME, 'R', -1, from, -1, to, REAL(rename)(from, to));
}
CACHE(renameat);
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    NAMES_BODY(RENAME, 'R', from_fd, from, to_fd, to, REAL(renameat)(from_fd, from, to_fd, to));
}
CACHE(link);
int link(const char *from, const char *to) {
    NAMES_BODY(LINK, 'L', -1, from, -1, to, REAL(link)(from, to));
}
CACHE(linkat);
int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    NAMES_BODY(LINK, 'L', from_fd, from, to_fd, to, REAL(linkat)(from_fd, from, to_fd, to, flags));
}
CACHE(symlink);
int symlink(const char *target, const char *path) {
    NAME_BODY(LINK, 0, -1, REAL(symlink)(target, path));
}
CACHE(unlink);
int unlink(const char *path) { NAME_BODY(UNLINK, 'U', -1, REAL(unlink)(path)); }
CACHE(unlinkat);
int unlinkat(int at, const char *path, int flags) {
    char what = (flags & AT_REMOVEDIR) ? 'D' : 'U';
    NAME_BODY(UNLINK, what, at, REAL(unlinkat)(at, path, flags));
}
CACHE(rmdir);
int rmdir(const char *path) { NAME_BODY(UNLINK, 'D', -1, REAL(rmdir)(path)); }
CACHE(mkdir);
int mkdir(const char *path, mode_t mode) { NAME_BODY(MKDIR, 'M', -1, REAL(mkdir)(path, mode)); }
CACHE(mkdirat);
int mkdirat(int at, const char *path, mode_t mode) {
    NAME_BODY(MKDIR, 'M', at, REAL(mkdirat)(at, path, mode));
}

/* ---- stat ---- */

#define STAT_BODY(at, call) \
    char whole[PATH_MAX]; \
    if (resolve(at, path, whole)) { \
        FAULT(STAT); \
    } \
    return call

#define FSTAT_BODY(call) \
    if (is_tracked(fd)) { \
        FAULT(STAT); \
    } \
    return call

CACHE(stat64);
int stat64(const char *path, struct stat64 *to) { STAT_BODY(-1, REAL(stat64)(path, to)); }
CACHE(lstat64);
int lstat64(const char *path, struct stat64 *to) { STAT_BODY(-1, REAL(lstat64)(path, to)); }
CACHE(fstat64);
int fstat64(int fd, struct stat64 *to) { FSTAT_BODY(REAL(fstat64)(fd, to)); }
CACHE(fstatat64);
int fstatat64(int at, const char *path, struct stat64 *to, int flags) {
    STAT_BODY(at, REAL(fstatat64)(at, path, to, flags));
}
int stat(const char *path, struct stat *to) { return stat64(path, (struct stat64 *)to); }
int lstat(const char *path, struct stat *to) { return lstat64(path, (struct stat64 *)to); }
int fstat(int fd, struct stat *to) { return fstat64(fd, (struct stat64 *)to); }
int __xstat64(int version, const char *path, struct stat64 *to) {
    (void)version;
    return stat64(path, to);
}
int __lxstat64(int version, const char *path, struct stat64 *to) {
    (void)version;
    return lstat64(path, to);
}
int __fxstat64(int version, int fd, struct stat64 *to) {
    (void)version;
    return fstat64(fd, to);
}
CACHE(statx);
int statx(int at, const char *path, int flags, unsigned mask, struct statx *to) {
    if (path[0] == 0 && is_tracked(at)) {
        FAULT(STAT);
        return REAL(statx)(at, path, flags, mask, to);
    }
    STAT_BODY(at, REAL(statx)(at, path, flags, mask, to));
}
