// The search runs in a worker, which a browser refuses to a page that was opened from a file. There, a frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source === this.inside) {
          const copy = new MessageEvent("message", { data: event.data })
          this.dispatchEvent(copy)
          this.onmessage?.(copy)
        }
      })
      const script = text => `<script${text}</` + "script>"
      const globals = `
        const load = url => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, async: false, onload: done, onerror: failed })
          document.body.append(script)
        })
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve())
        window.postMessage = data => parent.dispatchEvent(new MessageEvent("message", { data, source: window }))`
      this.ready = new Promise(done => frame.addEventListener("load", done))
      const body = this.inside.document
      body.open()
      body.write(`<body>${script(">" + globals)}${script(` src="${url}">`)}`)
      body.close()
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
