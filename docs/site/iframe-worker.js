// Browsers start no worker from a page on disk. The search, which asks for one, runs in a hidden frame there.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((resolve) => {
        const script = this.scope.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve })
        this.scope.document.head.append(script)
      })
    }

    async postMessage(data) {
      await this.loaded
      this.scope.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
