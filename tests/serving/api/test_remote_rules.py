"""Which addresses of images are read how, which hosts were named, and which networks are public."""

from ipaddress import ip_address

import pytest

from serving.api.remote import ImageHosts, Refused, RemoteUrl, is_public, parse_url, redirected

BASE = RemoteUrl("https", "a.example", 443, "/one/two.png?x=1")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("http://a.example/x.png", ("http", "a.example", 80, "/x.png")),
        ("HTTPS://A.Example:8443/x?y=%20&z=@b", ("https", "a.example", 8443, "/x?y=%20&z=@b")),
        ("https://a.example", ("https", "a.example", 443, "/")),
        ("https://a.example?q", ("https", "a.example", 443, "/?q")),
        ("https://a.example./x", ("https", "a.example", 443, "/x")),
        ("https://a.example/x#@evil.example/", ("https", "a.example", 443, "/x")),
        ("http://93.184.216.34:80/x", ("http", "93.184.216.34", 80, "/x")),
    ],
)
def test_a_plain_address_is_read_into_its_parts(text, parts):
    assert parse_url(text) == RemoteUrl(*parts)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("file:///etc/passwd", "http:// or https://"),
        ("ftp://a.example/x", "http:// or https://"),
        ("//a.example/x", "http:// or https://"),
        ("/etc/passwd", "http:// or https://"),
        ("gopher://a.example/", "http:// or https://"),
        ("http://user@a.example/x", "user name"),
        ("http://user:word@a.example/x", "user name"),
        ("http://a.example@evil.example/x", "user name"),
        ("http://a.example:80@evil.example/x", "user name"),
        ("http://@a.example/", "user name"),
        ("http://evil.example\\@a.example/x", "not plain"),
        ("http://a.example\\.evil.example/x", "not plain"),
        ("http:\\\\a.example\\x", "http:// or https://"),
        ("http://a.example/x y", "not plain"),
        ("http://a.example/x\r\nHost: b.example", "not plain"),
        ("http://a.example\t/x", "not plain"),
        ("http://a.example/\u00e9", "not plain"),
        ("http://a.example/\N{KELVIN SIGN}", "not plain"),
        ("http://\N{KELVIN SIGN}.example/x", "not plain"),
        ("http://a\u3002example/x", "not plain"),
        ("http://\u24d0.example/x", "not plain"),
        ("http://[::1]/x", "not plain"),
        ("http://[::ffff:127.0.0.1]/x", "not plain"),
        ("http://a.example%2eevil.example/x", "not plain"),
        ("http://a.example:/x", "not plain"),
        ("http://a.example:80:80/x", "not plain"),
        ("http://-a.example/x", "not plain"),
        ("http://a..example/x", "not plain"),
        ("http:///x", "not plain"),
        ("http://a.example/" + "x" * 5000, "5017 characters"),
    ],
)
def test_any_other_address_is_refused_by_a_rule(text, rule):
    with pytest.raises(Refused, match=rule) as refused:
        parse_url(text)
    assert "evil" not in str(refused.value), "the text names the rule, not what was sent"


@pytest.mark.parametrize(
    ("location", "parts"),
    [
        (b"three.png", ("https", "a.example", 443, "/one/three.png")),
        (b"/three.png?y", ("https", "a.example", 443, "/three.png?y")),
        (b"//b.example/x", ("https", "b.example", 443, "/x")),
        (b"https://b.example:8443/x", ("https", "b.example", 8443, "/x")),
        (b"?y=2", ("https", "a.example", 443, "/one/?y=2")),
    ],
)
def test_a_redirect_is_read_relative_to_where_it_came_from(location, parts):
    assert redirected(BASE, location) == RemoteUrl(*parts)


@pytest.mark.parametrize(
    ("location", "rule"),
    [
        (b"http://a.example/x", "leave https"),
        (b"file:///etc/passwd", "http:// or https://"),
        (b"/\\evil.example/x", "not plain"),
        (b"\\\\evil.example/x", "not plain"),
        (b"https://a.example@evil.example/", "user name"),
        (b"@evil.example/x\xff", "percent-encoded"),
        (b"javascript:alert(1)", "http:// or https://"),
    ],
)
def test_a_redirect_obeys_the_same_rules(location, rule):
    with pytest.raises(Refused, match=rule):
        redirected(BASE, location)


def test_a_relative_redirect_cannot_extend_the_host():
    assert redirected(RemoteUrl("http", "a.example", 80, "/"), b"@evil.example/x").host == "a.example"
    assert redirected(RemoteUrl("http", "a.example", 80, "/"), b".evil.example/x").host == "a.example"


def test_hosts_are_named_exactly_with_their_ports():
    hosts = ImageHosts.parse("a.example, B.example:8443,c.example:80,c.example:8080")
    for allowed in ("http://a.example/", "https://a.example/", "https://b.example:8443/", "http://c.example:8080/"):
        hosts.check(parse_url(allowed))
    for other in ("http://x.a.example/", "http://a.example.evil.example/", "http://example/", "http://2130706433/"):
        with pytest.raises(Refused, match="not one that this server fetches from"):
            hosts.check(parse_url(other))
    for port in ("http://a.example:8080/", "https://b.example/", "http://c.example:81/", "http://a.example:22/"):
        with pytest.raises(Refused, match="does not fetch from port"):
            hosts.check(parse_url(port))


@pytest.mark.parametrize("text", ["", "a.example,", "http://a.example", "*.example", "a.example:0", "a b", "a:99999"])
def test_a_list_of_hosts_that_is_not_one_is_refused(text):
    with pytest.raises(ValueError, match="is not a host name with an optional port"):
        ImageHosts.parse(text)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e"])
def test_public_addresses_are_public(address):
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.8.8.8"),
        *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1"),
        *("198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "::8.8.8.8"),
        *(
            "64:ff9b::7f00:1",
            "64:ff9b::808:808",
            "64:ff9b:1::a00:1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "2002:808:808::",
        ),
        *("2001::1", "2001:0:7f00:1::", "2001:db8::1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%eth0", "fec0::1"),
        *("ff02::1", "100::1", "4000::1"),
    ],
)
def test_all_other_addresses_are_not(address):
    assert not is_public(ip_address(address))
